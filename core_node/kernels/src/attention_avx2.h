// Attention in f32 over bf16 K and V, widened in registers. Scores are a product with K as W, transposed 32 positions at
// a time; V is read as it lies, so inside 16 dimensions of a result are kept as 8 even and 8 odd ones, which is how
// bf16 comes apart. No column is computed that nobody asked for. Included by attention.h.
#pragma once

// One thread's.
struct AttentionScratch {
  float *q, *scores, *out;  // [columns][dim], [columns][kSpan], [columns][dim]
  char* keys;               // 32 positions of K, as a block of W
  float top[kMaxColumns], sum[kMaxColumns];

  AttentionScratch(Arena& arena, int dim)
      : q((float*)arena.take(size_t(kMaxColumns) * dim * 4)),
        scores((float*)arena.take(size_t(kMaxColumns) * kSpan * 4)),
        out((float*)arena.take(size_t(kMaxColumns) * dim * 4)),
        keys((char*)arena.take(size_t(kBlockN) * dim * 2)) {}
};

// K of 8 positions from `k` on, transposed into one half of a tile's columns: K is then what W is in a product.
inline void transpose_keys(const bf16* k, size_t row, int dim, char* tile, size_t tile_step, Ahead& ahead) {
  for (int d = 0; d < dim; d += 8) {
    ahead(2);
    __m256i r[4];
    for (int i = 0; i < 4; i++) {
      const __m128i low = _mm_loadu_si128((const __m128i*)(k + i * row + d));
      r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                     _mm_loadu_si128((const __m128i*)(k + (i + 4) * row + d)), 1);
    }
    const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpacklo_epi32(r[2], r[3]);
    const __m256i c = _mm256_unpackhi_epi32(r[0], r[1]), e = _mm256_unpackhi_epi32(r[2], r[3]);
    char* to = tile + d / kTileK * tile_step + d % kTileK / 2 * 64;
    _mm256_store_si256((__m256i*)to, _mm256_unpacklo_epi64(a, b));
    _mm256_store_si256((__m256i*)(to + 64), _mm256_unpackhi_epi64(a, b));
    _mm256_store_si256((__m256i*)(to + 128), _mm256_unpacklo_epi64(c, e));
    _mm256_store_si256((__m256i*)(to + 192), _mm256_unpackhi_epi64(c, e));
  }
}

// out += weights x V of positions [first, first + n), for C columns and H times 16 dimensions from `d` on.
template <int C, int H>
[[gnu::noinline]] void weigh(const KeysValues& kv, int first, int n, int dim, int d, const float* weights, float* out) {
  Vec sums[C][2 * H];
#pragma GCC unroll 6
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * H; i++) sums[c][i] = load(out + c * dim + d + i * kLanes);
  const float* weights3 = weights + 3 * kSpan;
  for (int at = 0; at < n; at += kPoolBlock) {
    const bf16* v = kv.v + kv.block_at(first + at) + d;
    for (const bf16* end = v + std::min(n - at, kPoolBlock) * kv.row; v < end; v += kv.row, weights++, weights3++)
#pragma GCC unroll 2
      for (int half = 0; half < H; half++) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i*)(v + 16 * half));
        const Vec even = evens(pairs), odd = odds(pairs);
#pragma GCC unroll 6
        for (int c = 0; c < C; c++) {
          const Vec w = broadcast(c < 3 ? weights + c * kSpan : weights3 + (c - 3) * kSpan);
          sums[c][2 * half] = fma(w, even, sums[c][2 * half]);
          sums[c][2 * half + 1] = fma(w, odd, sums[c][2 * half + 1]);
        }
      }
  }
#pragma GCC unroll 6
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * H; i++) store(out + c * dim + d + i * kLanes, sums[c][i]);
}

inline void weigh_values(const KeysValues& kv, int first, int n, int dim, int columns, const float* weights, float* out) {
  auto all = [&]<int C, int H>() {
    for (int d = 0; d < dim; d += 16 * H) weigh<C, H>(kv, first, n, dim, d, weights, out);
  };
  switch (columns) {
    case 1: return all.template operator()<1, 2>();
    case 2: return all.template operator()<2, 2>();
    case 3: return all.template operator()<3, 2>();
    case 4: return all.template operator()<4, 1>();
    case 5: return all.template operator()<5, 1>();
    case 6: return all.template operator()<6, 1>();
  }
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
    for (int d = 0; d < dim; d += kLanes) store(scratch.q + size_t(c) * dim + d, mul(load(from + d), scale));
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
      float *scores = scratch.scores + c0 * kSpan, *result = scratch.out + size_t(c0) * dim;
      for (int at = 0; at < n; at += kBlockN) {
        for (int key = 0; key < kBlockN; key += 8)
          transpose_keys(kv.k + kv.block_or_last(first + at + key) + key % kPoolBlock * kv.row, kv.row, dim,
                         scratch.keys + key / 16 * kTileBytes + key / 8 % 2 * 32, 2 * kTileBytes, ahead);
        in_groups(per_head, [&](int c, int columns) {
          block_product<Bf16Tile>(columns, scratch.q + size_t(c0 + c) * dim, dim, scratch.keys, dim / kTileK,
                                  scores + c * kSpan + at, kSpan, [](int) {});
        });
      }
      for (int c = 0; c < per_head; c++)
        span_weights(scores + c * kSpan, std::min(n, item.position + row_of(c) + 1 - first), n, scratch.top[c0 + c],
                     scratch.sum[c0 + c], result + size_t(c) * dim, dim);
      in_groups(per_head, [&](int c, int columns) {
        weigh_values(kv, first, n, dim, columns, scores + c * kSpan, result + size_t(c) * dim);
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
