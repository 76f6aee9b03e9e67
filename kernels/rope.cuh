// The rotation: angles, pairing of dims, rotate and its adjoint. Mirrors fused_rope_xattn/rope.py.
#pragma once

#include <cmath>

#include "host_device.h"

namespace frx {

struct PairDims {
  int first, second;
};
struct Pair {
  float first, second;
};
struct CosSin {
  float cos, sin;
};

// base ** (-2 * pair / axis_width) for pair in [0, axis_width / 2).
FRX_HOST_DEVICE double inverse_frequency(int pair, int axis_width, double log2_base) {
  return exp2(-(2.0 * pair / axis_width) * log2_base);
}

// The angle position * frequency as a fraction of a turn in [-0.5, 0.5]. 1 / (2 pi) is taken in two
// terms, so the reduction adds nothing to the rounding of the fp64 angle, however large.
FRX_HOST_DEVICE double turns_of(double position, double frequency) {
  constexpr double kTurnsPerRadian = 0x1.45f306dc9c883p-3;
  constexpr double kTurnsPerRadianLow = -0x1.6b01ec5417056p-57;
  const double angle = position * frequency;
  const double turns = angle * kTurnsPerRadian;
  const double rest = fma(angle, kTurnsPerRadianLow, fma(angle, kTurnsPerRadian, -turns));
  const double fraction = (turns - rint(turns)) + rest;
  return fraction - rint(fraction);
}

FRX_HOST_DEVICE double turns_of(double position, int pair, int axis_width, double log2_base) {
  return turns_of(position, inverse_frequency(pair, axis_width, log2_base));
}

// turns in [-0.5, 0.5]. fp32 sine and cosine of the angle's leading part; what fp32 dropped of the
// angle enters to first order.
FRX_HOST_DEVICE CosSin cos_sin(double turns) {
  constexpr double kPi = 0x1.921fb54442d18p+1;
  const float half_turns = static_cast<float>(2.0 * turns);
  const float rest = static_cast<float>(kPi) * static_cast<float>(2.0 * turns - half_turns);
  CosSin leading;
#ifdef __CUDA_ARCH__
  sincospif(half_turns, &leading.sin, &leading.cos);
#else
  leading.cos = static_cast<float>(std::cos(kPi * half_turns));
  leading.sin = static_cast<float>(std::sin(kPi * half_turns));
#endif
  return {fmaf(-rest, leading.sin, leading.cos), fmaf(rest, leading.cos, leading.sin)};
}

// The index-th pair of an axis that has axis_pairs of them.
FRX_HOST_DEVICE PairDims axis_pair_dims(int axis, int index, int axis_pairs, bool interleaved) {
  const int pair = axis * axis_pairs + index;
  if (interleaved) return {2 * pair, 2 * pair + 1};
  const int first = pair + axis * axis_pairs;
  return {first, first + axis_pairs};
}

// Pair p = axis * (width / 2) + j, with width = rotary_dim / axes.
FRX_HOST_DEVICE PairDims pair_dims(int pair, int rotary_dim, int axes, bool interleaved) {
  if (interleaved) return {2 * pair, 2 * pair + 1};
  const int half_width = rotary_dim / axes / 2;
  const int first = pair + pair / half_width * half_width;
  return {first, first + half_width};
}

FRX_HOST_DEVICE Pair rotate(Pair x, float c, float s) {
  return {c * x.first - s * x.second, c * x.second + s * x.first};
}

// The adjoint, which is also the inverse when c^2 + s^2 = 1.
FRX_HOST_DEVICE Pair rotate_back(Pair g, float c, float s) {
  return {c * g.first + s * g.second, c * g.second - s * g.first};
}

// Full-width tables: each member of the pair has its own cosine and sine. Row by row the matrix is
// (c0 -s0; s1 c1), its transpose (c0 s1; -s0 c1).
FRX_HOST_DEVICE Pair rotate(Pair x, CosSin first, CosSin second) {
  return {first.cos * x.first - first.sin * x.second, second.cos * x.second + second.sin * x.first};
}

FRX_HOST_DEVICE Pair rotate_back(Pair g, CosSin first, CosSin second) {
  return {first.cos * g.first + second.sin * g.second, second.cos * g.second - first.sin * g.first};
}

}  // namespace frx
