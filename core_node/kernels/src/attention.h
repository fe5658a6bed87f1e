// Causal attention over paged KV, for decode (one row) and prefill (many) alike: what is the same in each variant.
//
// A *column* is one query: one row of one query head. Keys are taken in spans of 128 from position 0, and the running
// maximum, sum and result of a column are rescaled span by span. What a column gets depends on its own position alone:
// not on the rows beside it, not on where a prompt was cut.
#pragma once

#include "linear.h"

constexpr int kPoolBlock = 16;  // positions a block
constexpr int kSpan = 128;
constexpr int kMaxColumns = 96;  // of one work item

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

// The sequences of a step: i has rows [row_start[i], row_start[i + 1]), the first of them at position[i], its block
// table at tables + table_start[i].
struct Sequences {
  int n;
  const int *row_start, *position, *table_start, *tables;
};

#ifdef __AVX512F__
#include "attention_avx512.h"
#else
#include "attention_avx2.h"
#endif
