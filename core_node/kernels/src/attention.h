// Causal attention over paged KV, for decode (one row) and prefill (many) alike: what is the same in each variant.
//
// A *column* is one query: one row of one query head. Keys are taken in spans of 128 from position 0, and the running
// maximum, sum and result of a column are rescaled span by span. What a column gets depends on its own position alone:
// not on the rows beside it, not on where a prompt was cut.
#pragma once

#include "linear.h"

constexpr int kPoolBlock = 16;  // positions a block
constexpr int kSpan = 128;
constexpr int kMaxColumns = 96, kMaxHeads = 16;  // of one work item

struct Heads {
  int n_q, n_kv, dim;  // dim is a multiple of 32
  int group() const { return n_q / n_kv; }
};

// One layer's pool of one kind: [slots][n_kv][dim] bf16.
struct Pool {
  const bf16 *k, *v;
};

// One KV head of one sequence in one layer's pool: `row` elements from a position to the next in a block.
struct KeysValues {
  const bf16 *k, *v;
  const int* table;
  int n_keys;
  size_t row;

  size_t block_at(int key) const { return size_t(table[key / kPoolBlock]) * kPoolBlock * row; }

  // Where the block of `key` begins; beyond the last key the last block stands in (its weight will be zero).
  size_t block_or_last(int key) const { return block_at(std::min(key, n_keys - 1)); }
};

// Asks for K and V that will be needed, a few lines at a time between other work: all at once they would only queue.
// Positions from `key` on, at most kSpan of them, `width` bytes of each.
class Ahead {
 public:
  Ahead(const KeysValues& kv, int key, int width)
      : kv_(kv), key_(key), end_(std::min(kv.n_keys, key + kSpan)), width_(width) {}

  void operator()(int lines) {
    for (; lines > 0 && key_ < end_; lines--) {
      const size_t at = (kv_.block_at(key_) + size_t(row_) * kv_.row) * 2 + byte_;
      _mm_prefetch((const char*)kv_.k + at, _MM_HINT_T0);
      _mm_prefetch((const char*)kv_.v + at, _MM_HINT_T0);
      if ((byte_ += 64) < width_) continue;
      byte_ = 0;
      if (++row_ < kPoolBlock) continue;
      row_ = 0;
      key_ += kPoolBlock;
    }
  }

 private:
  const KeysValues kv_;
  int key_, row_ = 0, byte_ = 0;
  const int end_, width_;
};

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

  // Items for all heads of `rows` rows.
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

#ifdef __AVX512F__
#include "attention_avx512.h"
#else
#include "attention_avx2.h"
#endif
