// Attention in f32 over bf16 K and V, widened in registers. Scores are a product with K as W, transposed 32 positions at
// a time; V is read as it lies, so inside 16 dimensions of a result are kept as 8 even and 8 odd ones, which is how
// bf16 comes apart. No column is computed that nobody asked for. Rows of different sequences whose block tables agree
// over a span (a shared prefix) are computed together, so K and V are read and transposed once for them.
// Included by attention.h.
#pragma once

// One row of a step: `row` is its place there, `position` its own in its sequence.
struct Row {
  const int* table;
  int row, position;
};

// Rows that read the same blocks for the `n` positions from `first` on, or fewer where a row's own come earlier.
struct Run {
  const Row* rows;
  int n_rows, first, n;
};

// What one call of `attend` does: some rows, for KV heads [head0, head1).
struct Item {
  const Row* rows;
  int n_rows, head0, head1;

  int n_heads() const { return head1 - head0; }
};

// Whether a span's blocks are the same for both: of one sequence, or as a prefix that sequences share.
inline bool same_span(const Row& a, const Row& b, int first) {
  if (a.table == b.table) return true;
  const int *from = a.table + first / kPoolBlock, *other = b.table + first / kPoolBlock;
  return std::min(a.position, b.position) + 1 >= first + kSpan && std::equal(from, from + kSpan / kPoolBlock, other);
}

// The work items of a step.
class Plan {
 public:
  std::vector<Item> items;

  void make(const Heads& heads, const Sequences& s, int n_threads) {
    rows_.resize(s.row_start[s.n]);
    items.clear();
    int n_single = 0, at = 0;
    for (int i = 0; i < s.n; i++)
      if (s.row_start[i + 1] - s.row_start[i] == 1) rows_[n_single++] = row(s, i, 0);
    // Sharers side by side. The order of rows changes no result.
    std::sort(rows_.begin(), rows_.begin() + n_single, [](const Row& a, const Row& b) {
      const int n = a.position / kPoolBlock + 1, other = b.position / kPoolBlock + 1;
      return std::lexicographical_compare(a.table, a.table + n, b.table, b.table + other);
    });
    const int most_sharers = std::clamp(kMaxColumns / heads.group(), 1, kSharers);
    while (at < n_single) {
      int end = at + 1;
      while (end < n_single && end - at < most_sharers && same_span(rows_[at], rows_[end], 0)) end++;
      add(heads, at, end - at, n_threads, n_single < n_threads);
      at = end;
    }
    for (int i = 0; i < s.n; i++) {
      const int n = s.row_start[i + 1] - s.row_start[i], most = std::max(1, kMaxColumns / heads.group());
      if (n == 1) continue;
      for (int r = 0; r < n; r++) rows_[at + r] = row(s, i, r);
      for (int r = 0; r < n; r += most) add(heads, at + r, std::min(most, n - r), n_threads, s.n < n_threads);
      at += n;
    }
  }

 private:
  static constexpr int kSharers = 8;  // rows that share are cut into items of so many, so that all threads get some

  static Row row(const Sequences& s, int i, int r) {
    return {s.tables + s.table_start[i], s.row_start[i] + r, s.position[i] + r};
  }

  // One item for all heads if the rows are few, so that K and V are read in the order in which they lie; more of them
  // if there would be too few for the threads.
  void add(const Heads& h, int at, int n, int n_threads, bool alone) {
    int n_heads = std::clamp(16 / (h.group() * n), 1, h.n_kv);
    if (alone) n_heads = std::min(n_heads, (h.n_kv + n_threads - 1) / n_threads);
    for (int head = 0; head < h.n_kv; head += n_heads)
      items.push_back({rows_.data() + at, n, head, std::min(head + n_heads, h.n_kv)});
  }

  std::vector<Row> rows_;
};

// One thread's.
struct AttentionScratch {
  float *q, *scores, *out;  // [columns][dim], [columns][kSpan], [columns][dim]
  char* keys;               // 32 positions of K, as a block of W
  float top[kMaxColumns], sum[kMaxColumns];
  std::vector<Run> runs;

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

// The runs of an item, span by span.
inline void find_runs(const Item& item, std::vector<Run>& runs) {
  runs.clear();
  const Row* const end = item.rows + item.n_rows;
  int last = 0;
  for (const Row* r = item.rows; r < end; r++) last = std::max(last, r->position);
  for (int first = 0; first <= last; first += kSpan)
    for (const Row *from = item.rows, *to; from < end; from = to) {
      int here = from->position;
      for (to = from + 1; to < end && same_span(*from, *to, first); to++) here = std::max(here, to->position);
      if (here >= first) runs.push_back({from, int(to - from), first, std::min(kSpan, here + 1 - first)});
    }
}

// q: f32 [rows of the step][n_q][dim]; the result goes to `out`, what enters the product with W_o. `next` is this
// thread's next item, of which the first span is fetched meanwhile.
template <bool Amx>
inline void attend(const Heads& heads, const Pool& pool, const Item& item, const Item& next, const float* q, char* out,
                   AttentionScratch& scratch) {
  const int dim = heads.dim, group = heads.group();
  const int per_head = group * item.n_rows, n_columns = per_head * item.n_heads();
  const Vec scale = set1(1.44269504f / std::sqrt(float(dim)));
  auto keys_values = [&](const Row& row, int n_keys, int head) -> KeysValues {
    return {pool.k + head * dim, pool.v + head * dim, row.table, n_keys, size_t(heads.n_kv) * dim};
  };

  // Column c: head c / per_head of the item, row c % per_head / group, query head c % group of the KV head.
  auto row_of = [&](int c) { return item.rows[c % per_head / group].row; };
  auto q_head_of = [&](int c) { return (item.head0 + c / per_head) * group + c % group; };
  for (int c = 0; c < n_columns; c++) {
    const float* from = q + (size_t(row_of(c)) * heads.n_q + q_head_of(c)) * dim;
    for (int d = 0; d < dim; d += kLanes) store(scratch.q + size_t(c) * dim + d, mul(load(from + d), scale));
    scratch.top[c] = -1e30f;
    scratch.sum[c] = 0;
  }
  std::fill_n(scratch.out, size_t(n_columns) * dim, 0.f);

  find_runs(item, scratch.runs);
  for (size_t i = 0; i < scratch.runs.size(); i++) {
    const Run& run = scratch.runs[i];
    const bool more = i + 1 < scratch.runs.size();
    const Run& then = more ? scratch.runs[i + 1] : Run{next.rows, 1, 0, next.rows[0].position + 1};
    const Item& whose = more ? item : next;
    Ahead ahead(keys_values(then.rows[0], then.first + then.n, whose.head0), then.first, whose.n_heads() * dim * 2);
    const int n_run = group * run.n_rows;
    for (int h = 0; h < item.n_heads(); h++) {
      const KeysValues kv = keys_values(run.rows[0], run.first + run.n, item.head0 + h);
      const int c0 = h * per_head + int(run.rows - item.rows) * group;
      float *scores = scratch.scores + c0 * kSpan, *result = scratch.out + size_t(c0) * dim;
      for (int at = 0; at < run.n; at += kBlockN) {
        for (int key = 0; key < kBlockN; key += 8)
          transpose_keys(kv.k + kv.block_or_last(run.first + at + key) + key % kPoolBlock * kv.row, kv.row, dim,
                         scratch.keys + key / 16 * kTileBytes + key / 8 % 2 * 32, 2 * kTileBytes, ahead);
        in_groups(n_run, [&](int c, int columns) {
          block_product<Bf16Tile>(columns, scratch.q + size_t(c0 + c) * dim, dim, scratch.keys, dim / kTileK,
                                  scores + c * kSpan + at, kSpan, [](int) {});
        });
      }
      for (int c = 0; c < n_run; c++)
        span_weights(scores + c * kSpan, std::min(run.n, run.rows[c / group].position + 1 - run.first), run.n,
                     scratch.top[c0 + c], scratch.sum[c0 + c], result + size_t(c) * dim, dim);
      in_groups(n_run, [&](int c, int columns) {
        weigh_values(kv, run.first, run.n, dim, columns, scores + c * kSpan, result + size_t(c) * dim);
      });
    }
  }

  for (int c = 0; c < n_columns; c++) {
    const Vec inverse = set1(1.f / scratch.sum[c]);
    for (int d = 0; d < dim; d += 16) {
      const float* from = scratch.out + size_t(c) * dim + d;
      const Vec even = mul(load(from), inverse), odd = mul(load(from + 8), inverse);
      const Vec a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
      float* to = activations(out, heads.n_q * dim, row_of(c), q_head_of(c) * dim + d);
      store(to, _mm256_permute2f128_ps(a, b, 0x20));
      store(to + 8, _mm256_permute2f128_ps(a, b, 0x31));
    }
  }
}
