// TF32 operands of Hopper's tensor cores.
#pragma once

#include "host_device.h"

namespace frx {

// fp32 in memory and registers, multiplied in TF32.
struct Tf32 {};

// Which of eight accumulator columns (keys, of scores) serves as depth k of a product.
FRX_HOST_DEVICE int tf32_key(int k) { return 2 * (k % 4) + k / 4; }

// And the other way round.
FRX_HOST_DEVICE int tf32_depth(int key) { return key / 2 + 4 * (key % 2); }

}  // namespace frx
