// Attention in f32 over bf16 K and V, widened in registers. Lanes run along the head's dimensions, so K and V are read
// as they lie, and no column is computed that nobody asked for. The lanes of a score are added up in a fixed order.
// Inside, 16 dimensions are kept as 8 even and 8 odd ones, which is how bf16 comes apart. Included by attention.h.
#pragma once

// One thread's.
struct AttentionScratch {
  float *q, *scores, *out;  // [columns][dim], [columns][kSpan], [columns][dim]
  float top[kMaxColumns], sum[kMaxColumns];

  AttentionScratch(Arena& arena, int dim)
      : q((float*)arena.take(size_t(kMaxColumns) * dim * 4)),
        scores((float*)arena.take(size_t(kMaxColumns) * kSpan * 4)),
        out((float*)arena.take(size_t(kMaxColumns) * dim * 4)) {}
};

// The sum of each of four vectors.
inline __m128 sums_of(Vec a, Vec b, Vec c, Vec d) {
  const Vec s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

// Scores of four keys for C columns.
template <int C>
inline void score(const bf16* k, size_t row, const float* q, int dim, float* scores) {
  Vec sums[C][4];
#pragma GCC unroll 3
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sums[c][i] = zero();
  for (int d = 0; d < dim; d += 16)
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      Vec keys[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i*)(k + i * row + d));
        keys[i] = odd ? odds(pairs) : evens(pairs);
      }
#pragma GCC unroll 3
      for (int c = 0; c < C; c++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[c][i] = fma(keys[i], load(q + c * dim + d + odd * kLanes), sums[c][i]);
    }
#pragma GCC unroll 3
  for (int c = 0; c < C; c++)
    _mm_storeu_ps(scores + c * kSpan, sums_of(sums[c][0], sums[c][1], sums[c][2], sums[c][3]));
}

// out += weights x V of positions [first, first + n), for C columns and 32 dimensions.
template <int C>
inline void weigh(const KeysValues& kv, int first, int n, int dim, int d, const float* weights, float* out) {
  Vec sums[C][4];
#pragma GCC unroll 3
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sums[c][i] = load(out + c * dim + d + i * kLanes);
  for (int at = 0; at < n; at += kPoolBlock) {
    const bf16* v = kv.v + kv.block_at(first + at) + d;
    for (int key = at; key < std::min(n, at + kPoolBlock); key++, v += kv.row)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i*)(v + 16 * half));
        const Vec even = evens(pairs), odd = odds(pairs);
#pragma GCC unroll 3
        for (int c = 0; c < C; c++) {
          const Vec w = broadcast(weights + c * kSpan + key);
          sums[c][2 * half] = fma(w, even, sums[c][2 * half]);
          sums[c][2 * half + 1] = fma(w, odd, sums[c][2 * half + 1]);
        }
      }
  }
#pragma GCC unroll 3
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) store(out + c * dim + d + i * kLanes, sums[c][i]);
}

// `use.operator()<C>(c)` for `columns` columns, three at a time.
template <class Use>
inline void by_threes(int columns, Use use) {
  int c = 0;
  for (; c + 3 <= columns; c += 3) use.template operator()<3>(c);
  if (columns - c == 2) use.template operator()<2>(c);
  if (columns - c == 1) use.template operator()<1>(c);
}

// Scores to weights 2^(score - top) for the `there` keys of a span that a column may see, and zero for the others up
// to `n`; its result so far is rescaled.
inline void span_weights(float* scores, int there, int n, float& top, float& sum, float* out, int dim) {
  if (there <= 0) {
    std::fill_n(scores, n, 0.f);
    return;
  }
  std::fill(scores + there, scores + round_up(there, kLanes), -1e30f);
  Vec most = set1(top);
  for (int i = 0; i < there; i += kLanes) most = _mm256_max_ps(most, load(scores + i));
  const float before = top;
  top = max_of(most);
  Vec total = zero();
  for (int i = 0; i < there; i += kLanes) {
    Vec w = exp2_negative(_mm256_sub_ps(load(scores + i), set1(top)));
    const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(i), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    w = _mm256_and_ps(w, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(there), lane)));
    store(scores + i, w);
    total = add(total, w);
  }
  for (int i = int(round_up(there, kLanes)); i < n; i++) scores[i] = 0;
  const Vec keep = exp2_negative(set1(before - top));
  sum = sum * _mm256_cvtss_f32(keep) + sum_of(total);
  for (int d = 0; d < dim; d += kLanes) store(out + d, mul(load(out + d), keep));
}

// q: f32 [rows of the step][n_q][dim]; the result goes to `out`, what enters the product with W_o. `next` is this
// thread's next item, of which the first span is fetched meanwhile.
template <bool Amx>
inline void attend(const Heads& heads, const Pool& pool, const Item& item, const Item& next, const float* q, char* out,
                   AttentionScratch& scratch) {
  const int dim = heads.dim, group = heads.group(), n_keys = item.n_keys();
  const int per_head = group * item.rows, n_columns = per_head * item.n_heads();
  const Vec scale = set1(1.44269504f / std::sqrt(float(dim)));

  // Column c: head c / per_head of the item, row c % per_head / group, query head c % group of the KV head.
  auto row_of = [&](int c) { return c % per_head / group; };
  auto q_head_of = [&](int c) { return (item.head0 + c / per_head) * group + c % group; };
  for (int c = 0; c < n_columns; c++) {
    const float* from = q + (size_t(item.row0 + row_of(c)) * heads.n_q + q_head_of(c)) * dim;
    for (int d = 0; d < dim; d += 16) {
      const Vec a = mul(load(from + d), scale), b = mul(load(from + d + 8), scale);
      float* to = scratch.q + size_t(c) * dim + d;
      auto in_order = [](Vec x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)); };
      store(to, in_order(_mm256_shuffle_ps(a, b, 0x88)));
      store(to + 8, in_order(_mm256_shuffle_ps(a, b, 0xdd)));
    }
    scratch.top[c] = -1e30f;
    scratch.sum[c] = 0;
  }
  std::fill_n(scratch.out, size_t(n_columns) * dim, 0.f);

  for (int first = 0; first < n_keys; first += kSpan) {
    const bool more = first + kSpan < n_keys;
    const int n = std::min(kSpan, n_keys - first);
    Ahead ahead(more ? item.head(heads, pool, 0) : next.head(heads, pool, 0), more ? first + kSpan : 0,
                (more ? item : next).n_heads() * dim * 2);
    for (int h = 0; h < item.n_heads(); h++) {
      const KeysValues kv = item.head(heads, pool, h);
      const int c0 = h * per_head;
      for (int key = 0; key < n; key += 4) {
        ahead(4 * dim / 32);
        const bf16* k = kv.k + kv.block_at(first + key) + key % kPoolBlock * kv.row;
        by_threes(per_head, [&]<int C>(int c) {
          score<C>(k, kv.row, scratch.q + size_t(c0 + c) * dim, dim, scratch.scores + (c0 + c) * kSpan + key);
        });
      }
      for (int c = c0; c < c0 + per_head; c++)
        span_weights(scratch.scores + c * kSpan, std::min(n, item.position + row_of(c) + 1 - first), n, scratch.top[c],
                     scratch.sum[c], scratch.out + size_t(c) * dim, dim);
      by_threes(per_head, [&]<int C>(int c) {
        for (int d = 0; d < dim; d += 32)
          weigh<C>(kv, first, n, dim, d, scratch.scores + (c0 + c) * kSpan, scratch.out + size_t(c0 + c) * dim);
      });
    }
  }

  for (int c = 0; c < n_columns; c++) {
    const Vec inverse = set1(1.f / scratch.sum[c]);
    for (int d = 0; d < dim; d += 16) {
      const float* from = scratch.out + size_t(c) * dim + d;
      const Vec even = mul(load(from), inverse), odd = mul(load(from + 8), inverse);
      const Vec a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
      float* to = activations(out, heads.n_q * dim, item.row0 + row_of(c), q_head_of(c) * dim + d);
      store(to, _mm256_permute2f128_ps(a, b, 0x20));
      store(to + 8, _mm256_permute2f128_ps(a, b, 0x31));
    }
  }
}
