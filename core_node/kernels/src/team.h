// Threads that work on one step together: the caller is thread 0. Work is handed out by tickets, so that a core that
// is slower for a moment (another guest, another process) does less; phases end at a barrier.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

class Team {
 public:
  explicit Team(int n_threads) : n_(n_threads) {
    for (int t = 1; t < n_; t++) workers_.emplace_back([this, t] { work(t); });
  }

  ~Team() {
    stopping_ = true;
    round_.fetch_add(1);
    round_.notify_all();
    for (auto& w : workers_) w.join();
  }

  int size() const { return n_; }

  // Run `job(thread)` on all threads and wait for them.
  void run(std::function<void(int)> job) {
    job_ = std::move(job);
    next_ticket_.store(n_, std::memory_order_relaxed);
    round_.fetch_add(1);
    round_.notify_all();
    job_(0);
    barrier();
  }

  // All threads of a job meet here. Spins: phases take microseconds. Sleeps once it takes longer: another process has a
  // core then, and the scheduler gives a core back to who slept sooner than to who yielded.
  void barrier() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_ticket_.store(n_, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      phase_.notify_all();
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase && spins < kSpins; spins++) _mm_pause();
    phase_.wait(phase, std::memory_order_acquire);
  }

  // Between two barriers: item `thread` is a thread's first, then these, until they are used up.
  int next_ticket() { return next_ticket_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr int kSpins = 2000;

  void work(int thread) {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; round_.load(std::memory_order_acquire) == seen && spins < kSpins; spins++) _mm_pause();
      round_.wait(seen, std::memory_order_acquire);
      seen++;
      if (stopping_) return;
      job_(thread);
      barrier();
    }
  }

  const int n_;
  std::vector<std::thread> workers_;
  std::function<void(int)> job_;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> next_ticket_{0};
};
