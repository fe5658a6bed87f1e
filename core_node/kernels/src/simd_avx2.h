// AVX2 and FMA: what they have no single instruction for. Products are of f32: bf16 weights are widened in registers,
// x stays f32. Each sum over k is one chain of FMAs in rising k, whatever surrounds it: results do not depend on the
// batch, and they are nearer to f32's than those of the bf16 variants. Included by simd.h.
#pragma once

using Vec = __m256;
constexpr int kLanes = 8;
using Activation = float;  // what enters a product

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// One float in all lanes. The load stays where it is written: GCC gathers them ahead otherwise, and spills sums.
inline Vec broadcast(const float* p) {
  Vec x;
  __asm__ volatile("vbroadcastss %1, %0" : "=x"(x) : "m"(*p));
  return x;
}

inline float sum_of(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float max_of(Vec x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

inline Vec load_bf16(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

// Of 16 bf16 as they lie in memory, those at even and at odd places, in f32.
inline Vec evens(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Vec odds(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
}

// A float's bits, rounded to bf16 (nearest even), in the low half of each dword. NaN stays NaN.
inline __m256i rounded(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}

// 16 floats to 16 bf16, in order.
inline void store_bf16(void* p, Vec low, Vec high) {
  const __m256i packed = _mm256_packus_epi32(rounded(low), rounded(high));  // inside 128-bit lanes
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

inline void store_activations(Activation* p, Vec low, Vec high) {
  store(p, low);
  store(p + kLanes, high);
}

// 2^x for x <= 0 to 3e-6; exactly 1 at 0, and about 2^-126 from there down.
inline Vec exp2_negative(Vec x) {
  x = _mm256_max_ps(set1(-126.f), x);  // a NaN in x stays
  Vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vec f = _mm256_sub_ps(x, whole);  // in [-0.5, 0.5]: polynomial of least relative error, 1 at 0
  Vec y = set1(9.582853425e-3f);
  y = fma(y, f, set1(5.590642846e-2f));
  y = fma(y, f, set1(2.402409863e-1f));
  y = fma(y, f, set1(6.931241930e-1f));
  y = fma(y, f, set1(1.f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return mul(y, _mm256_castsi256_ps(power));
}

inline Vec silu(Vec x) {
  // With e = 2^(-|x| log2 e): sigmoid(x) is 1 / (1 + e) for x >= 0 and e / (1 + e) below; neither overflows.
  const Vec one = set1(1.f);
  const Vec e = exp2_negative(mul(_mm256_or_ps(x, set1(-0.f)), set1(1.44269504f)));
  const Vec negative = _mm256_cmp_ps(x, zero(), _CMP_LT_OQ);
  return _mm256_div_ps(mul(x, _mm256_blendv_ps(one, e, negative)), add(one, e));
}

// Adjacent pairs of x turned by the angles whose cosines and sines (4 of each) are given.
inline Vec turned(Vec x, const float* cos, const float* sin) {
  const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  const Vec c = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(cos)), twice);
  const Vec s = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(sin)), twice);
  return _mm256_fmaddsub_ps(x, c, mul(_mm256_permute_ps(x, 0xb1), s));
}

// Logits x[0 .. n) of ids from `first` on, n at most 16, kept at `keep` if that is not null.
inline void take_best(Best& best, const float* x, int first, int n, float* keep) {
  for (int i = 0; i < n; i += kLanes) {
    const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(i), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
    const Vec v = load(x + i), better = _mm256_cmp_ps(v, load(best.value + i), _CMP_GT_OQ);
    const __m256i take = _mm256_and_si256(there, _mm256_castps_si256(better));
    _mm256_maskstore_ps(best.value + i, take, v);
    _mm256_maskstore_epi32(best.id + i, take, _mm256_add_epi32(lane, _mm256_set1_epi32(first)));
    const Vec nan = _mm256_and_ps(_mm256_castsi256_ps(there), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    best.nan |= _mm256_movemask_ps(nan);
    if (keep) _mm256_maskstore_ps(keep + i, there, v);
  }
}
