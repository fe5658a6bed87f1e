// AVX-512 and AMX: what they have no single instruction for: bf16 conversions, exp, 16x16 transposes, tile products.
//
// A *tile* is 1 KiB: 16 rows of 64 bytes (32 bf16). Two kinds meet in a product C[16x16] += A x B, f32:
//   A tile: row r holds 32 consecutive k of one row.
//   B tile: row p holds, for each of 16 columns, the pair k = 2p, 2p + 1.
// With AMX a product is one instruction a tile pair; without it, 256 vdpbf16ps. Each element of C is summed over k in
// the same order wherever it lies in a tile and whatever surrounds it, so results do not depend on the batch.
#pragma once

using Vec = __m512;
constexpr int kLanes = 16;
using Activation = bf16;  // what enters a product

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum_of(Vec x) { return _mm512_reduce_add_ps(x); }

inline __m512 load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

// 32 floats to 32 bf16 (nearest even), in order.
inline void store_bf16(void* p, __m512 low, __m512 high) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

inline void store_activations(Activation* p, Vec low, Vec high) { store_bf16(p, low, high); }

// Adjacent pairs of x turned by the angles whose cosines and sines (8 of each) are given.
inline Vec turned(Vec x, const float* cos, const float* sin) {
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  __m512 c = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(cos)));
  __m512 s = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(sin)));
  return _mm512_fmaddsub_ps(x, c, _mm512_mul_ps(_mm512_permute_ps(x, 0xb1), s));
}

// Logits x[0 .. n) of ids from `first` on, n at most 16, kept at `keep` if that is not null.
inline void take_best(Best& best, const float* x16, int first, int n, float* keep) {
  const __mmask16 there = __mmask16((1u << n) - 1);
  const __m512 x = _mm512_load_ps(x16), old = _mm512_load_ps(best.value);
  const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(first),
                                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __mmask16 better = _mm512_mask_cmp_ps_mask(there, x, old, _CMP_GT_OQ);
  _mm512_mask_store_ps(best.value, better, x);
  _mm512_mask_store_epi32(best.id, better, ids);
  best.nan |= _mm512_mask_cmp_ps_mask(there, x, x, _CMP_UNORD_Q);
  if (keep) _mm512_mask_storeu_ps(keep, there, x);
}

// 2^x for x <= 0 to 3e-6 (what it is for is rounded to bf16, 4e-3); exactly 1 at 0, and 0 far below -126.
inline __m512 exp2_negative(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-200.f));
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(x, whole);  // in [-0.5, 0.5]: polynomial of least relative error, 1 at 0
  __m512 y = _mm512_set1_ps(9.582853425e-3f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.590642846e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402409863e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931241930e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(y, whole);
}

inline __m512 silu(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504f), one = _mm512_set1_ps(1.f);
  // With e = 2^(-|x| log2 e): sigmoid(x) is 1 / (1 + e) for x >= 0 and e / (1 + e) below; neither overflows.
  __m512 e = exp2_negative(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)), log2e));
  __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_div_ps(_mm512_mul_ps(x, _mm512_mask_blend_ps(negative, one, e)), _mm512_add_ps(one, e));
}

// Transpose 16 rows `r` of 16 dwords into a tile.
inline void transpose16(__m512i (&r)[16], void* to) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // Now r[4 * i + j] has, in 128-bit lane l, column 4 * l + j of rows 4 * i .. 4 * i + 3.
  for (int j = 0; j < 4; j++) {
    __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    __m512i c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd), d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    char* out = (char*)to;
    _mm512_storeu_si512(out + j * 64, _mm512_shuffle_i32x4(a, b, 0x88));
    _mm512_storeu_si512(out + (4 + j) * 64, _mm512_shuffle_i32x4(c, d, 0x88));
    _mm512_storeu_si512(out + (8 + j) * 64, _mm512_shuffle_i32x4(a, b, 0xdd));
    _mm512_storeu_si512(out + (12 + j) * 64, _mm512_shuffle_i32x4(c, d, 0xdd));
  }
}

// All tiles full size, once a thread. GCC before 13 declares that ldtilecfg reads 8 of its 64 bytes and drops the
// other stores; hence the asm.
inline void configure_tiles() {
  alignas(64) uint8_t config[64] = {1};
  for (int t = 0; t < 8; t++) {
    config[16 + 2 * t] = 64;
    config[48 + t] = kTileRows;
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(*(const uint8_t(*)[64])config));
}

inline void release_tiles() { _tile_release(); }

// Up to four products at once, c[i] = sum over `steps` of a(i, s) x b(i, s): AMX takes 52 cycles for a result and 16
// for the next. c[i] begins at c + i * c_next, its rows are `c_row` floats apart; `n` is 2 or 4; rows of A `a_row` bytes.
template <bool Amx, class A, class B>
inline void tile_products(float* c, size_t c_next, size_t c_row, int n, int steps, A a, size_t a_row, B b) {
  if constexpr (Amx) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < steps; s++) {
      _tile_loadd(4, a(0, s), a_row);
      _tile_loadd(6, b(0, s), 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a(1, s), a_row);
      _tile_loadd(7, b(1, s), 64);
      _tile_dpbf16ps(1, 5, 7);
      if (n > 2) {
        _tile_loadd(4, a(2, s), a_row);
        _tile_loadd(6, b(2, s), 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, a(3, s), a_row);
        _tile_loadd(7, b(3, s), 64);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, c_row * 4);
    _tile_stored(1, c + c_next, c_row * 4);
    if (n > 2) {
      _tile_stored(2, c + 2 * c_next, c_row * 4);
      _tile_stored(3, c + 3 * c_next, c_row * 4);
    }
  } else {
    for (int i = 0; i < n; i++)
      for (int r0 = 0; r0 < kTileRows; r0 += 8) {
        __m512 sums[8];
        for (auto& sum : sums) sum = _mm512_setzero_ps();
        for (int s = 0; s < steps; s++)
          for (int p = 0; p < 16; p++) {
            const __m512bh w = (__m512bh)_mm512_loadu_si512((const char*)b(i, s) + p * 64);
            for (int r = 0; r < 8; r++) {
              int32_t pair;
              memcpy(&pair, (const char*)a(i, s) + (r0 + r) * a_row + p * 4, 4);
              sums[r] = _mm512_dpbf16_ps(sums[r], w, (__m512bh)_mm512_set1_epi32(pair));
            }
          }
        for (int r = 0; r < 8; r++) _mm512_storeu_ps(c + i * c_next + (r0 + r) * c_row, sums[r]);
      }
  }
}
