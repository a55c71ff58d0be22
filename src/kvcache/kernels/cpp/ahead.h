// Cache lines fetched into the first- or second-level cache a few at a time while others are computed with: memory then works
// all the time, not only while rows are read. Hardware prefetchers do not see through rows that are read four at a time:
// without this a core of Zen 5 reads 6 GB/s, with it 30.
#pragma once

#include <algorithm>

#include "vec.h"

namespace kv {

constexpr int TILE = 64;  // slots that are decoded and computed with at a time

// Lines that are on their way before they are read; into which level, as `__builtin_prefetch` names it (3: the first, 2: the
// second); and whether they are asked for between the loops of products instead of within. Fewer lines come too late; more push
// out of the first-level cache what has not been read yet, and the second level answers late while memory is busy (Zen 5: 128
// and 400 cost 7 to 9 %).
#if defined(KVCACHE_FETCH_SECOND)
// A core of Zen 4 that reads runs of 32 KB here and there gets 15 GB/s when it asks for lines into the first level, as if it had
// not asked, and 25 into the second. To count them within the loop of scores takes a fifth of it.
constexpr int DISTANCE = 384, FETCHED_INTO = 2;
constexpr bool BETWEEN_LOOPS = true;
#else
constexpr int DISTANCE = 256, FETCHED_INTO = 3;
constexpr bool BETWEEN_LOOPS = false;
#endif
// The same for the tile unit. Not a whole number of pages: 128 costs 5 % in large blocks (Granite Rapids; 96 to 224 are alike
// otherwise), perhaps because reading and fetching then turn to new pages at the same time.
constexpr int UNIT_DISTANCE = 160;
constexpr int EXPANDED_DISTANCE = 96;  // rows that are expanded want room in the first-level cache, too (160 costs up to 7 %)

struct Run {  // adjacent bytes [begin, end)
  const uint8_t *begin, *end;
};

template <int N>
struct Lines {  // where the rows of one side of a tile lie, or of several tiles
  int num_runs, num_lines;
  Run runs[N];

  void clear() { num_runs = num_lines = 0; }

  // What is adjacent becomes one run: to turn to the next costs time.
  void add(const uint8_t* begin, const uint8_t* end) {
    num_lines += int((end - begin + 63) / 64);
    if (num_runs > 0 && runs[num_runs - 1].end == begin)
      runs[num_runs - 1].end = end;
    else
      runs[num_runs++] = {begin, end};
  }

  template <int M>
  void add(const Lines<M>& lines) {
    for (int i = 0; i < lines.num_runs; i++) add(lines.runs[i].begin, lines.runs[i].end);
  }
};

struct Side {
  const Run *begin = nullptr, *end = nullptr;

  Side() = default;
  template <int N>
  Side(const Lines<N>& lines) : begin(lines.runs), end(lines.runs + lines.num_runs) {}
};

#if defined(KV_BF16)
// Lines that are asked for all at once take the processor's sixteen fill buffers, and hold up what it would fetch by itself,
// which is more. So each address waits for multiplications (by zero, three cycles) that wait for the ones before.
class Spaced {
 public:
  template <int WAITS, int LOCALITY>
  KV_INLINE void fetch(const void* at) {
#pragma GCC unroll 4
    for (int i = 0; i < WAITS; i++) asm volatile("imul $0, %0, %0" : "+r"(zero));
    __builtin_prefetch(static_cast<const uint8_t*>(at) + zero, 0, LOCALITY);
  }

 private:
  uint64_t zero = 0;
};
#endif

class Ahead {
 public:
  // Fetches `lines` lines from the four sides, in their order and without the first `skip`, in `work` units of work. (A unit
  // takes about 10 cycles.)
  Ahead(Side first, Side second, Side third, Side fourth, int skip, int lines, int work)
      : sides{first, second, third, fourth}, side(0), next(nullptr), last(nullptr), run{nullptr, nullptr},
        rate(lines * 256 / work + 1), credit(0) {
    while (skip > 0 && (run.begin < run.end || turn())) {
      const int part = std::min<int>(skip, int((run.end - run.begin + 63) / 64));
      run.begin += 64 * part;
      skip -= part;
    }
  }

#if defined(KV_BF16)
  // The next N lines, one by one.
  template <int N>
  KV_INLINE void fetch() {
    if (run.end - run.begin < 64 * N) return fetch(N);
#pragma GCC unroll 64
    for (int i = 0; i < N; i++) spaced.fetch<1, 3>(run.begin + 64 * i);
    run.begin += 64 * N;
  }

  KV_INLINE void fetch(int lines) {
    while (lines > 0 && (run.begin < run.end || turn())) {
      const int part = std::min<int>(lines, int((run.end - run.begin + 63) / 64));
      Spaced pace = spaced;  // in registers
      const uint8_t* at = run.begin;
      for (int i = 0; i < part; i++, at += 64) pace.fetch<1, 3>(at);
      run.begin = at, spaced = pace, lines -= part;
    }
  }
#endif

  template <int WORK, int LOCALITY = FETCHED_INTO>
  KV_INLINE void step() {
    for (credit += WORK * rate; credit >= 256; credit -= 256) {
      if (run.begin >= run.end && !turn()) return;
      __builtin_prefetch(run.begin, 0, LOCALITY);
      run.begin += 64;
    }
  }

  // The same for much work at once: a call between loops, which costs them less than steps within.
  // (The prefetches stay in its own loop: GCC 12 takes a lambda of nothing else for one without effects, and drops it.)
  __attribute__((noinline)) void advance(int work) {
    credit += work * rate;
    int lines = credit / 256;
    credit %= 256;
    while (lines > 0 && (run.begin < run.end || turn())) {
      const int part = std::min<int>(lines, int((run.end - run.begin + 63) / 64));
      for (int i = 0; i < part; i++) __builtin_prefetch(run.begin + 64 * i, 0, FETCHED_INTO);
      run.begin += 64 * part, lines -= part;
    }
  }

  // Loops of products call both, one before and one within, of which one does something.
  KV_INLINE void before(int work) {
    if (BETWEEN_LOOPS) advance(work);
  }
  template <int WORK>
  KV_INLINE void within() {
    if (!BETWEEN_LOOPS) step<WORK>();
  }

 private:
  Side sides[4];
  int side;                // the next of them
  const Run *next, *last;  // runs of the current one that are not begun
  Run run;                 // what is left of the current run
  int rate, credit;        // lines per unit of work, and lines due, in 1/256

#if defined(KV_BF16)
  Spaced spaced;
#endif

  KV_INLINE bool turn() {
    for (; next == last; side++) {
      if (side == 4) {
        rate = credit = 0;
        return false;
      }
      next = sides[side].begin, last = sides[side].end;
    }
    run = *next++;
    return true;
  }
};

// Fetches a line that `Ahead` has asked for once more, just before it is read: memory that is asked for all it can give drops
// some requests (of sampled lines 1 to 8 % were missing, in small blocks up to 30 %), and the read of one holds up the rest.
KV_INLINE void fetch_dropped(const uint8_t* at) { __builtin_prefetch(at, 0, 3); }

}  // namespace kv
