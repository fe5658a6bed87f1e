// Attention with tile products; 16 columns make a tile. Scores are computed transposed, S^T [keys, 16], with the pool's
// K as it lies as A tiles, so that maximum and sum over keys run down the lanes. Included by attention.h.
#pragma once

constexpr int kMaxHeads = 16;  // of one work item

// One thread's.
struct AttentionScratch {
  char *v_tiles, *q_tiles, *p_tiles;  // bf16 tiles: of a span of V, of all Q columns, of one tile's weights
  float *scores, *out, *part, *top, *sum;

  AttentionScratch(Arena& arena, int dim)
      : v_tiles((char*)arena.take(size_t(kMaxHeads) * kSpan * dim * 2)),
        q_tiles((char*)arena.take(size_t(std::max(kMaxColumns, 16 * kMaxHeads)) * dim * 2)),
        p_tiles((char*)arena.take(kSpan / 32 * kTileBytes)),
        scores((float*)arena.take(kSpan * 16 * 4)),
        out((float*)arena.take(size_t(kMaxColumns) * dim * 4)),
        part((float*)arena.take(size_t(16) * dim * 4)),
        top((float*)arena.take(kMaxColumns * 4)),
        sum((float*)arena.take(kMaxColumns * 4)) {}
};

// V of keys [first, first + n), n a multiple of 32, as B tiles [n / 32][dim / 16]. unpack works inside 128-bit lanes,
// so the columns of each 32 of `dim` come out as 0-3, 8-11, .. and 4-7, 12-15, ..: `attend` puts them right at its end.
inline void gather_v(const KeysValues& kv, int first, int n, int dim, char* tiles, Ahead& ahead) {
  for (int at = 0; at < n; at += kPoolBlock) {
    const bf16* from = kv.v + kv.block_or_last(first + at);
    for (int key = at; key < at + kPoolBlock; key += 2, from += 2 * kv.row) {
      char* to = tiles + size_t(key / 32) * (dim / 16) * kTileBytes + key % 32 / 2 * 64;
      ahead((dim + 63) / 64);
      for (int d = 0; d < dim; d += 32, to += 2 * kTileBytes) {
        __m512i a = _mm512_loadu_si512(from + d), b = _mm512_loadu_si512(from + kv.row + d);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(to + kTileBytes, _mm512_unpackhi_epi16(a, b));
      }
    }
  }
}

// exp(scores - top) as A tiles [n / 32][16 columns][32 keys] bf16; returns their sums (before rounding).
inline __m512 span_weights(const float* scores, int n, __m512 top, char* p_tiles, Ahead& ahead, int lines) {
  // The halves of what vcvtne2ps2bf16 gives (all of b, all of a), put side by side.
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; i++) order[i] = uint16_t(i / 2 + i % 2 * 16);
  const __m512i side_by_side = _mm512_load_si512(order);
  __m512 sum = _mm512_setzero_ps();
  for (int at = 0; at < n; at += 32) {
    __m512i pairs[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const float* s = scores + (at + 2 * i) * 16;
      ahead(lines);
      __m512 a = exp2_negative(_mm512_sub_ps(_mm512_load_ps(s), top));
      __m512 b = exp2_negative(_mm512_sub_ps(_mm512_load_ps(s + 16), top));
      sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
      pairs[i] = _mm512_permutexvar_epi16(side_by_side, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    transpose16(pairs, p_tiles + at / 32 * kTileBytes);
  }
  return sum;
}

// Add rows [row0, row1) of a span's `part` [16][dim], relative to the maxima `top`, to `total`, relative to `before`.
inline void merge_span(float* total, const float* part, int dim, int row0, int row1, __m512 before, __m512 top) {
  alignas(64) float keep[16], add[16];
  const __m512 both = _mm512_max_ps(before, top);
  _mm512_store_ps(keep, exp2_negative(_mm512_sub_ps(before, both)));
  _mm512_store_ps(add, exp2_negative(_mm512_sub_ps(top, both)));
  for (int c = row0; c < row1; c++)
    for (int d = 0; d < dim; d += 16) {
      __m512 kept = _mm512_mul_ps(_mm512_load_ps(total + c * dim + d), _mm512_set1_ps(keep[c]));
      __m512 added = _mm512_load_ps(part + c * dim + d);
      _mm512_store_ps(total + c * dim + d, _mm512_fmadd_ps(added, _mm512_set1_ps(add[c]), kept));
    }
}

// What one call of `attend` does: rows [row0, row0 + rows) of one sequence, the first of them at `position`, for KV
// heads [head0, head1). Either one head and as many columns as there is room for, or several heads whose columns make
// up one tile (decode): then a head's Q tile is zero in the columns of the others, and adding up the heads' products
// gives each column its own.
struct Item {
  const int* table;
  int row0, rows, position, head0, head1;

  int n_keys() const { return position + rows; }
  int n_heads() const { return head1 - head0; }
  KeysValues head(const Heads& h, const Pool& pool, int i) const {
    const int at = std::min(head0 + i, head1 - 1) * h.dim;
    return {pool.k + at, pool.v + at, table, n_keys(), size_t(h.n_kv) * h.dim};
  }

  // Items for all heads of `rows` rows. `alone`: there are fewer sequences than threads.
  static void add(const Heads& h, const int* table, int row0, int rows, int position, int n_threads, bool alone,
                  std::vector<Item>& to) {
    const int columns = h.group() * rows;
    if (columns <= 16) {
      int heads = std::min({h.n_kv, 16 / columns, kMaxHeads});
      if (alone) heads = std::min(heads, (h.n_kv + n_threads - 1) / n_threads);
      for (int head = 0; head < h.n_kv; head += heads)
        to.push_back({table, row0, rows, position, head, std::min(head + heads, h.n_kv)});
      return;
    }
    const int most = kMaxColumns / h.group();
    for (int r = 0; r < rows; r += most)
      for (int head = 0; head < h.n_kv; head++)
        to.push_back({table, row0 + r, std::min(most, rows - r), position + r, head, head + 1});
  }
};

// The work items of a step.
struct Plan {
  std::vector<Item> items;

  void make(const Heads& heads, const Sequences& s, int n_threads) {
    items.clear();
    for (int i = 0; i < s.n; i++)
      Item::add(heads, s.tables + s.table_start[i], s.row_start[i], s.row_start[i + 1] - s.row_start[i], s.position[i],
                n_threads, s.n < n_threads, items);
  }
};

// q: bf16 [rows of the step][n_q][dim]; the result goes to A tiles `out` (k = head * dim + d). `next` is this thread's
// next item, of which the first span is fetched meanwhile.
template <bool Amx>
inline void attend(const Heads& heads, const Pool& pool, const Item& item, const Item& next, const bf16* q, char* out,
                   AttentionScratch& scratch) {
  const int dim = heads.dim, group = heads.group(), n_heads = item.n_heads(), n_keys = item.n_keys();
  const int per_head = group * item.rows, n_columns = per_head * n_heads, n_tiles = (n_columns + 15) / 16;
  const size_t q_bytes = size_t(dim / 32) * kTileBytes, v_bytes = size_t(kSpan) * dim * 2;
  const __m512 scale = _mm512_set1_ps(1.44269504f / std::sqrt(float(dim)));
  const __m512 gone = _mm512_set1_ps(-1e30f);

  // Column c: head c / per_head of the item, row c % per_head / group, query head c % group of the KV head.
  alignas(64) int limits[kMaxColumns];
  auto row_of = [&](int c) { return c % per_head / group; };
  auto q_head_of = [&](int c) { return (item.head0 + c / per_head) * group + c % group; };
  for (int c = 0; c < n_tiles * 16; c++) limits[c] = item.position + row_of(std::min(c, n_columns - 1));
  for (int h = 0; h < n_heads; h++)
    for (int t = 0; t < n_tiles; t++)
      for (int d = 0; d < dim; d += 32) {
        __m512i rows[16];
        for (int i = 0, c = 16 * t; i < 16; i++, c++)
          rows[i] = c < n_columns && c / per_head == h
                        ? _mm512_loadu_si512(q + (size_t(item.row0 + row_of(c)) * heads.n_q + q_head_of(c)) * dim + d)
                        : _mm512_setzero_si512();
        transpose16(rows, scratch.q_tiles + (h * n_tiles + t) * q_bytes + d / 32 * kTileBytes);
      }

  for (int first = 0; first < n_keys; first += kSpan) {
    const bool more = first + kSpan < n_keys;
    Ahead ahead(more ? item.head(heads, pool, 0) : next.head(heads, pool, 0), more ? first + kSpan : 0,
                (more ? item : next).n_heads() * dim * 2);
    const int lines = std::max(1, n_heads * dim / 64);  // of K, and as many of V, for two positions
    for (int h = 0; h < n_heads; h++)
      gather_v(item.head(heads, pool, h), first, int(round_up(std::min(kSpan, n_keys - first), 32)), dim,
               scratch.v_tiles + h * v_bytes, ahead);
    for (int t = 0; t < n_tiles; t++) {
      const __m512i limit = _mm512_load_si512(limits + 16 * t);
      const int least = _mm512_reduce_min_epi32(limit), last = _mm512_reduce_max_epi32(limit);
      if (last < first) continue;
      const int n = int(round_up(std::min(kSpan, last + 1 - first), 32));

      const KeysValues kv = item.head(heads, pool, 0);
      for (int at = 0; at < n; at += 4 * kPoolBlock) {
        ahead(32 * lines);
        tile_products<Amx>(
            scratch.scores + at * 16, 16 * 16, 16, std::min(4, (n - at) / kPoolBlock), n_heads * dim / 32,
            [&](int i, int s) { return kv.k + kv.block_or_last(first + at + i * kPoolBlock) + s * 32; }, kv.row * 2,
            [&](int, int s) {
              const int h = s / (dim / 32);
              return scratch.q_tiles + (h * n_tiles + t) * q_bytes + (s - h * (dim / 32)) * kTileBytes;
            });
      }
      __m512 top = gone;
      for (int i = 0; i < n; i++) {
        float* score = scratch.scores + 16 * i;
        __m512 x = _mm512_mul_ps(_mm512_load_ps(score), scale);
        if (first + i > least)
          x = _mm512_mask_mov_ps(gone, _mm512_cmple_epi32_mask(_mm512_set1_epi32(first + i), limit), x);
        _mm512_store_ps(score, x);
        top = _mm512_max_ps(top, x);
      }

      const __m512 sum = span_weights(scratch.scores, n, top, scratch.p_tiles, ahead, lines);
      float *tops = scratch.top + 16 * t, *sums = scratch.sum + 16 * t, *total = scratch.out + size_t(16) * t * dim;
      const __m512 before = _mm512_load_ps(tops);
      for (int h = 0; h < n_heads; h++) {
        ahead(dim);
        const bool direct = first == 0 && n_heads == 1;
        float* part = direct ? total : scratch.part;
        const char* v = scratch.v_tiles + h * v_bytes;
        for (int d = 0; d < dim / 16; d += 4)
          tile_products<Amx>(
              part + 16 * d, 16, dim, std::min(4, dim / 16 - d), n / 32,
              [&](int, int s) { return scratch.p_tiles + s * kTileBytes; }, 64,
              [&](int i, int s) { return v + (size_t(s) * (dim / 16) + d + i) * kTileBytes; });
        if (direct) continue;
        const int row0 = n_heads > 1 ? h * per_head : 0, row1 = n_heads > 1 ? row0 + per_head : 16;
        if (first == 0)
          memcpy(total + row0 * dim, part + row0 * dim, size_t(row1 - row0) * dim * 4);
        else
          merge_span(total, part, dim, row0, row1, before, top);
      }
      const __m512 both = first == 0 ? top : _mm512_max_ps(before, top);
      const __m512 kept = _mm512_mul_ps(_mm512_load_ps(sums), exp2_negative(_mm512_sub_ps(before, both)));
      const __m512 added = _mm512_mul_ps(sum, exp2_negative(_mm512_sub_ps(top, both)));
      _mm512_store_ps(sums, first == 0 ? sum : _mm512_add_ps(kept, added));
      _mm512_store_ps(tops, both);
    }
  }

  const __m512i first16 = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i last16 = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int c = 0; c < n_columns; c++) {
    const __m512 inverse = _mm512_set1_ps(1.f / scratch.sum[c]);
    for (int d = 0; d < dim; d += 32) {
      const float* from = scratch.out + size_t(c) * dim + d;
      __m512 a = _mm512_mul_ps(_mm512_load_ps(from), inverse), b = _mm512_mul_ps(_mm512_load_ps(from + 16), inverse);
      store_bf16(a_tile_row(out, heads.n_q * dim / 32, item.row0 + row_of(c), (q_head_of(c) * dim + d) / 32),
                 _mm512_permutex2var_ps(a, first16, b), _mm512_permutex2var_ps(a, last16, b));
    }
  }
}
