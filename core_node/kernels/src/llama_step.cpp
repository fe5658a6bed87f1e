// One step of a `llama` model in one call: all layers, all rows, logits, greedy choice. C ABI for ctypes.
//
// A step has rows (tokens) of sequences; K and V go into the caller's paged pool, and what is attended to is read from
// there. The residual stream is f32; what enters a product is bf16 with AVX-512 and f32 with AVX2. Every number of a
// row is computed in an order that does not depend on the other rows, so a step's result for a sequence is the same,
// bit for bit, in any company.
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

#include "attention.h"

extern "C" {

struct Shape {
  int32_t n_layers, hidden, n_q, n_kv, head_dim, ffn, vocab;  // hidden, head_dim and ffn are multiples of 32
  int32_t max_rows, max_logit_rows, n_threads, amx, int8;
  float norm_eps;
};

struct LayerSource {  // norms f32; matrices bf16 [out, in], adjacent-pair RoPE order
  const float *attention_norm, *ffn_norm;
  const bf16 *qkv, *attention_out, *gate_up, *down;
};

// Sequences of a step, one after another: sequence i has rows [row_start[i], row_start[i + 1]), the first of them at
// `position[i]`, its block table at tables + table_start[i]. `logit_row[i]`: which row of logits its last row's are,
// or -1.
struct Step {
  int32_t n_sequences, n_logit_rows, keep_logits;
  const int32_t *row_start, *position, *table_start, *logit_row, *token_ids, *tables;
  bf16 *k, *v;         // the pool: [n_layers][slots][n_kv][head_dim]
  int64_t layer_size;  // elements of one layer
  float* logits;       // [n_logit_rows][vocab], written if keep_logits
  int32_t* best_ids;   // [n_logit_rows]: the largest logit's id (the lowest on a tie), -1 if one is NaN
  float* best;         // [n_logit_rows]
  int64_t* phase_ns;   // [kPhases] or null: added to
};
}

namespace {

using Clock = std::chrono::steady_clock;

enum Phase { kEmbed, kQkv, kRope, kAttention, kOut, kNorm, kGateUp, kDown, kHead, kChoose, kPhases };

struct Layer {
  const float *attention_norm, *ffn_norm;
  Packed qkv, out, gate_up, down;
};

class Model {
 public:
  Model(const Shape& shape, const float* rope, int rope_positions)
      : s_(shape), heads_{shape.n_q, shape.n_kv, shape.head_dim}, team_(shape.n_threads) {
    const size_t rows = round_up(s_.max_rows, 32), n_qkv = (s_.n_q + 2 * s_.n_kv) * s_.head_dim;
    const size_t widest = std::max({s_.hidden, s_.ffn, s_.n_q * s_.head_dim});
    layers_.resize(s_.n_layers);
    rope_ = copy(rope, size_t(rope_positions) * s_.head_dim);
    x_ = (float*)arena_.take(rows * s_.hidden * 4);
    input_ = (char*)arena_.take(rows * std::max(s_.hidden, s_.n_q * s_.head_dim) * sizeof(Activation));
    act_ = (char*)arena_.take(rows * s_.ffn * sizeof(Activation));
    qkv_ = (float*)arena_.take(rows * n_qkv * 4);
    q_ = (Activation*)arena_.take(rows * s_.n_q * s_.head_dim * sizeof(Activation));
    head_in_ = (char*)arena_.take(round_up(s_.max_logit_rows, 32) * s_.hidden * sizeof(Activation));
    row_sequence_.resize(rows);
    for (int t = 0; t < s_.n_threads; t++) {
      best_.emplace_back(s_.max_logit_rows);
      scratch_.emplace_back(arena_, s_.head_dim);
      wide_.push_back(s_.int8 ? (char*)arena_.take(widest * kBlockN * 2) : nullptr);
    }
  }

  void set_layer(int i, const LayerSource& from) {
    const int q = s_.n_q * s_.head_dim, kv = s_.n_kv * s_.head_dim;
    Layer& to = layers_[i];
    to.attention_norm = copy(from.attention_norm, s_.hidden);
    to.ffn_norm = copy(from.ffn_norm, s_.hidden);
    to.qkv = pack(arena_, from.qkv, q + 2 * kv, s_.hidden, s_.int8, false);
    to.out = pack(arena_, from.attention_out, s_.hidden, q, s_.int8, false);
    to.gate_up = pack(arena_, from.gate_up, 2 * s_.ffn, s_.hidden, s_.int8, true);
    to.down = pack(arena_, from.down, s_.hidden, s_.ffn, s_.int8, false);
  }

  // `embedding` stays the caller's.
  void set_ends(const bf16* embedding, const float* norm, const bf16* head) {
    embedding_ = embedding;
    norm_ = copy(norm, s_.hidden);
    head_ = pack(arena_, head, s_.vocab, s_.hidden, s_.int8, false);
  }

  void step(const Step& step) {
    const int m = step.row_start[step.n_sequences];
    for (int i = 0; i < step.n_sequences; i++)
      std::fill(row_sequence_.begin() + step.row_start[i], row_sequence_.begin() + step.row_start[i + 1], i);
    plan_.make(heads_, {step.n_sequences, step.row_start, step.position, step.table_start, step.tables}, team_.size());
    for (auto& best : best_) std::fill_n(best.begin(), step.n_logit_rows, kNoBest);
    team_.run([&](int thread) {
#ifdef __AMX_TILE__
      if (s_.amx) {
        configure_tiles();
        work<true>(step, thread, m);
        release_tiles();
        return;
      }
#endif
      work<false>(step, thread, m);
    });
  }

 private:
  static const Best kNoBest;

  template <bool Amx>
  void work(const Step& step, int thread, int m) {
    auto before = Clock::now();
    auto end = [&](Phase phase) {
      team_.barrier();
      if (thread == 0 && step.phase_ns) {
        auto now = Clock::now();
        step.phase_ns[phase] += std::chrono::nanoseconds(now - before).count();
        before = now;
      }
    };
    const int n_qkv = (s_.n_q + 2 * s_.n_kv) * s_.head_dim;
    auto product = [&](const Packed& w, const char* in, int rows, auto use) {
      multiply<Amx>(team_, thread, w, in, rows, wide_[thread], use);
    };
    auto add_to_x = [&](int row0, int rows, int block, const float* c) {
      for (int r = 0; r < rows; r++) {
        float* x = x_ + size_t(row0 + r) * s_.hidden + block * kBlockN;
        for (int i = 0; i < kBlockN; i += kLanes) store(x + i, add(load(x + i), load(c + 32 * r + i)));
      }
    };

    for (int r = thread; r < m; r += team_.size()) {
      const bf16* from = embedding_ + size_t(step.token_ids[r]) * s_.hidden;
      float* x = x_ + size_t(r) * s_.hidden;
      for (int i = 0; i < s_.hidden; i += kLanes) store(x + i, load_bf16(from + i));
    }
    for (int l = 0; l < s_.n_layers; l++) {
      const Layer& layer = layers_[l];
      const Pool pool{step.k + l * step.layer_size, step.v + l * step.layer_size};
      // Rows are dealt out to threads in the same way here and above, and each row's x was complete at a barrier.
      for (int r = thread; r < m; r += team_.size()) norm(r, layer.attention_norm, input_, r);
      end(l ? kNorm : kEmbed);
      product(layer.qkv, input_, m, [&](int row0, int rows, int block, const float* c) {
        for (int r = 0; r < rows; r++)
          memcpy(qkv_ + size_t(row0 + r) * n_qkv + block * kBlockN, c + 32 * r, kBlockN * 4);
      });
      end(kQkv);
      for (int r = thread; r < m; r += team_.size()) rotate_and_store(step, r, l);
      end(kRope);
      attention<Amx>(pool, thread);
      end(kAttention);
      product(layer.out, input_, m, add_to_x);
      end(kOut);
      for (int r = thread; r < m; r += team_.size()) norm(r, layer.ffn_norm, input_, r);
      end(kNorm);
      product(layer.gate_up, input_, m, [&](int row0, int rows, int block, const float* c) {
        for (int r = 0; r < rows; r++) swiglu(c + 32 * r, act_, s_.ffn, row0 + r, 16 * block);
      });
      end(kGateUp);
      product(layer.down, act_, m, add_to_x);
      end(kDown);
    }
    for (int i = thread; i < step.n_sequences; i += team_.size())
      if (step.logit_row[i] >= 0) norm(step.row_start[i + 1] - 1, norm_, head_in_, step.logit_row[i]);
    end(kNorm);
    product(head_, head_in_, step.n_logit_rows, [&](int row0, int rows, int block, const float* c) {
      for (int r = 0; r < rows; r++) choose(step, thread, row0 + r, block, c + 32 * r);
    });
    end(kHead);
    for (int r = thread; r < step.n_logit_rows; r += team_.size()) merge_best(step, r);
    if (thread == 0 && step.phase_ns)
      step.phase_ns[kChoose] += std::chrono::nanoseconds(Clock::now() - before).count();
  }

  // RMSNorm of x's row `from` to row `to` of what enters a product.
  void norm(int from, const float* weight, char* input, int to) {
    const float* x = x_ + size_t(from) * s_.hidden;
    Vec a = zero(), b = a;
    for (int i = 0; i < s_.hidden; i += 2 * kLanes) {
      Vec u = load(x + i), v = load(x + i + kLanes);
      a = fma(u, u, a);
      b = fma(v, v, b);
    }
    const float mean = sum_of(add(a, b)) / float(s_.hidden);
    const Vec scale = set1(1.f / std::sqrt(mean + s_.norm_eps));
    for (int i = 0; i < s_.hidden; i += 2 * kLanes) {
      Vec u = mul(mul(load(x + i), scale), load(weight + i));
      Vec v = mul(mul(load(x + i + kLanes), scale), load(weight + i + kLanes));
      store_activations(activations(input, s_.hidden, to, i), u, v);
    }
  }

  // Q and K of one row are turned, Q to `q_`, K and V to the pool.
  void rotate_and_store(const Step& step, int r, int layer) {
    const int i = row_sequence_[r], at = step.position[i] + r - step.row_start[i], dim = s_.head_dim;
    const int block = step.tables[step.table_start[i] + at / kPoolBlock];
    const size_t slot = size_t(block) * kPoolBlock + at % kPoolBlock;
    const size_t to = layer * step.layer_size + slot * s_.n_kv * dim;
    const float *from = qkv_ + size_t(r) * (s_.n_q + 2 * s_.n_kv) * dim, *cos = rope_ + size_t(at) * dim;
    const float* sin = cos + dim / 2;
    auto turn = [&](int d) { return turned(load(from + d), cos + d / 2, sin + d / 2); };
    for (int head = 0; head < s_.n_q; head++, from += dim) {
      Activation* q = q_ + (size_t(r) * s_.n_q + head) * dim;
      for (int d = 0; d < dim; d += 2 * kLanes) store_activations(q + d, turn(d), turn(d + kLanes));
    }
    for (int head = 0; head < s_.n_kv; head++, from += dim) {
      bf16* k = step.k + to + size_t(head) * dim;
      for (int d = 0; d < dim; d += 2 * kLanes) store_bf16(k + d, turn(d), turn(d + kLanes));
    }
    for (int d = 0; d < s_.n_kv * dim; d += 2 * kLanes)
      store_bf16(step.v + to + d, load(from + d), load(from + d + kLanes));
  }

  template <bool Amx>
  void attention(const Pool& pool, int thread) {
    const std::vector<Item>& items = plan_.items;
    const int n_items = int(items.size());
    for (int t = thread; t < n_items;) {
      const int next = team_.next_ticket();
      attend<Amx>(heads_, pool, items[t], items[std::min(next, n_items - 1)], q_, input_, scratch_[thread]);
      t = next;
    }
  }

  void choose(const Step& step, int thread, int row, int block, const float* c) {
    Best& best = best_[thread][row];
    float* logits = step.keep_logits ? step.logits + size_t(row) * s_.vocab : nullptr;
    for (int i = 0; i < kBlockN; i += 16) {
      const int first = block * kBlockN + i, n = std::min(16, s_.vocab - first);
      if (n <= 0) break;
      take_best(best, c + i, first, n, logits ? logits + first : nullptr);
    }
  }

  void merge_best(const Step& step, int row) {
    float value = -INFINITY;
    int id = -1;
    bool nan = false;
    for (const auto& thread : best_) {
      const Best& b = thread[row];
      nan |= b.nan != 0;
      for (int i = 0; i < 16; i++)
        if (b.id[i] >= 0 && (id < 0 || b.value[i] > value || (b.value[i] == value && b.id[i] < id)))
          value = b.value[i], id = b.id[i];
    }
    step.best_ids[row] = nan ? -1 : id;
    step.best[row] = value;
  }

  float* copy(const float* from, size_t n) { return (float*)memcpy(arena_.take(n * 4), from, n * 4); }

  const Shape s_;
  const Heads heads_;
  Arena arena_;
  Team team_;
  std::vector<Layer> layers_;
  Packed head_;
  const bf16* embedding_ = nullptr;
  const float *norm_ = nullptr, *rope_ = nullptr;  // rope: [position][cos | sin][head_dim / 2]
  float *x_, *qkv_;                                // [rows][hidden], [rows][q, k, v]
  char *input_, *act_, *head_in_;                  // what enters a product, as linear_*.h wants it
  Activation* q_;                                  // [rows][n_q][head_dim]
  std::vector<int> row_sequence_;
  Plan plan_;
  std::vector<std::vector<Best>> best_;  // of each thread
  std::vector<AttentionScratch> scratch_;
  std::vector<char*> wide_;
};

const Best Model::kNoBest = [] {
  Best b;
  std::fill_n(b.value, 16, -INFINITY);
  std::fill_n(b.id, 16, -1);
  b.nan = 0;
  return b;
}();

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Ask the system for AMX's registers, once a process. 0: granted.
EXPORT int kvmesh_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return int(syscall(SYS_arch_prctl, kRequestPermission, kTileData));
}

// Null: out of memory. rope: f32 [positions][2][head_dim / 2].
EXPORT void* kvmesh_open(const Shape* shape, const float* rope, int32_t positions) {
  try {
    return new Model(*shape, rope, positions);
  } catch (const std::exception&) {
    return nullptr;
  }
}

EXPORT int kvmesh_set_layer(void* model, int32_t layer, const LayerSource* source) {
  try {
    ((Model*)model)->set_layer(layer, *source);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

EXPORT int kvmesh_set_ends(void* model, const bf16* embedding, const float* norm, const bf16* head) {
  try {
    ((Model*)model)->set_ends(embedding, norm, head);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

EXPORT void kvmesh_step(void* model, const Step* step) { ((Model*)model)->step(*step); }

EXPORT void kvmesh_close(void* model) { delete (Model*)model; }
}
