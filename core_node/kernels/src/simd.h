// The seam between what is the same on every processor (llama_step.cpp) and what is written for one.
//
// Each of simd_avx512.h and simd_avx2.h gives a vector of floats, `Vec`, of `kLanes`, what is done with it, and the type
// of what enters a product, `Activation`; linear_*.h and attention_*.h compute with it. One compile is one variant, so
// nothing of this is decided at run time but AMX.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

// Weights are kept as tiles of 16 rows of W and 32 of k: for each pair k = 2p, 2p + 1, the pairs of the 16 rows.
constexpr int kTileRows = 16;
constexpr int kTileK = 32;
constexpr size_t kTileBytes = 1024;

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

inline float to_f32(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// The best logit so far of each of 16 lanes of one row. Blocks come in rising order, so `>` keeps the lowest id.
struct alignas(64) Best {
  float value[16];
  int32_t id[16];
  int32_t nan;
};

#ifdef __AVX512F__
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif
