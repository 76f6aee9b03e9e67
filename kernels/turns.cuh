// Angles as fixed-point fractions of a turn: position * frequency modulo 1 by integer arithmetic.
//
// A 64-bit fraction keeps position * frequency right to 2^-32 turns for every 32-bit position, at
// three multiplications a pair where fp64 takes a dozen instructions at half rate and conversions
// at a quarter of that. Wrapping around is what integers do anyway.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "params.h"
#include "rope.cuh"

namespace frx {

// A position, which may have a fraction: whole + fraction * 2^-32.
struct FixedPosition {
  int64_t whole;
  uint32_t fraction;
};

// Beyond 63 bits a position saturates; neighbouring fp64 numbers are many turns apart there.
FRX_HOST_DEVICE FixedPosition fixed_position(double position) {
  constexpr double kLimit = 0x1p62, kUnit = 0x1p32, kLargest = 4294967295.0;
  const double within = fmin(fmax(position, -kLimit), kLimit);
  const double whole = floor(within);
  const double fraction = (within - whole) * kUnit;
  return {static_cast<int64_t>(whole), static_cast<uint32_t>(fmin(fraction, kLargest))};
}

FRX_HOST_DEVICE FixedPosition fixed_position_of(const RotationParams& r, int64_t batch,
                                                int64_t token, int axis) {
  const int64_t index = batch * r.position_batch_stride + token * r.axes + axis;
  switch (r.position_type) {
    case PositionType::kInt32:
      return {static_cast<const int32_t*>(r.positions)[index], 0};
    case PositionType::kInt64:
      return {static_cast<const int64_t*>(r.positions)[index], 0};
    case PositionType::kFloat32:
      return fixed_position(static_cast<const float*>(r.positions)[index]);
    case PositionType::kFloat64:
      return fixed_position(static_cast<const double*>(r.positions)[index]);
    default:
      return {token, 0};
  }
}

// Turns a position, modulo 1, in units of 2^-64. frequency in radians a position. 1 / (2 pi) is
// taken in two terms, so that the rounding of the fp64 frequency is the only error.
FRX_HOST_DEVICE uint64_t turns_a_position(double frequency) {
  constexpr double kTurnsPerRadian = 0x1.45f306dc9c883p-3;
  constexpr double kTurnsPerRadianLow = -0x1.6b01ec5417056p-57;
  constexpr double kUnit = 0x1p64;
  const double turns = frequency * kTurnsPerRadian;
  const double rest =
      fma(frequency, kTurnsPerRadianLow, fma(frequency, kTurnsPerRadian, -turns)) * kUnit;
  const double fraction = turns - floor(turns);
  return static_cast<uint64_t>(fraction * kUnit) +
         static_cast<uint64_t>(static_cast<int64_t>(rest));
}

// In units of 2^-32 turns. What the fraction of a position adds needs a frequency below one turn.
FRX_HOST_DEVICE uint32_t fraction_of_turn(FixedPosition position, uint64_t turns_a_position) {
  const uint64_t whole = static_cast<uint64_t>(position.whole) * turns_a_position;
  const uint64_t part =
      static_cast<uint64_t>(position.fraction) * static_cast<uint32_t>(turns_a_position >> 32);
  return static_cast<uint32_t>(whole >> 32) + static_cast<uint32_t>(part >> 32);
}

// Within 1.24e-7 of the exact values: the nearest quarter turn, then polynomials on what is left of
// at most an eighth. A fraction of 0 gives exactly (1, 0).
FRX_HOST_DEVICE CosSin cos_sin_of_turn(uint32_t turn) {
  constexpr float kRadians = 0x1.921fb6p-30f;  // 2 pi * 2^-32
  const uint32_t shifted = turn + (1u << 29);  // quarters in its two highest bits
  const int32_t rest = static_cast<int32_t>(shifted & 0x3fffffffu) - (1 << 29);
  const float y = static_cast<float>(rest) * kRadians, square = y * y;
  const float sine =
      fmaf(y * square,
           fmaf(fmaf(-1.9515295891e-4f, square, 8.3321608736e-3f), square, -1.6666654611e-1f), y);
  const float cosine = fmaf(square * square,
                            fmaf(fmaf(2.443315711809948e-5f, square, -1.388731625493765e-3f),
                                 square, 4.166664568298827e-2f),
                            fmaf(square, -0.5f, 1.f));
  const bool is_odd = (shifted & (1u << 30)) != 0;
  const float c = is_odd ? sine : cosine, s = is_odd ? cosine : sine;
  const bool negates_c = ((shifted + (1u << 30)) & (1u << 31)) != 0;
  const bool negates_s = (shifted & (1u << 31)) != 0;
  return {negates_c ? -c : c, negates_s ? -s : s};
}

}  // namespace frx
