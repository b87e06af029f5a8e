// How a thread sleeps until another rank has stored a word, without a system call on either side
// while nobody sleeps.
//
// Every rank owns one page of doorbells that its peers can write. A word's doorbell is chosen by
// the word's offset in its window, so both sides agree on it and the word itself stays a plain
// 32-bit value. Different words may share a doorbell: a sleeper may wake for another's word, looks
// at its own, and sleeps again.
//
// Memory order (Dekker's pattern; every access is sequentially consistent):
//
//   signaller  1. store word
//              2. load waiters; when not zero: add to sequence, futex wake
//   sleeper    1. add to waiters
//              2. load sequence, load word; when not there: futex wait while sequence is unchanged
//
// A signaller that reads waiters == 0 stored the word before the sleeper announced itself, so the
// sleeper reads the word. A signaller that reads more changes sequence after the word: a sleeper
// that read the old sequence does not fall asleep (or is woken), one that read the new sequence
// reads the word. A sleeper that dies leaves waiters high: later signals then cost a needless
// system call, nothing else.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tide {

struct alignas(64) Doorbell {
  std::atomic<uint32_t> sequence;
  std::atomic<uint32_t> waiters;
};

struct DoorbellPage {
  static constexpr int kCount = 64;
  Doorbell bells[kCount];

  // Of the word at this offset of its window.
  Doorbell& of(int64_t word_offset) {
    const auto index = static_cast<uint64_t>(word_offset) / sizeof(uint32_t);
    return bells[(index ^ (index >> 4)) % kCount];  // words a cache line apart do not all meet
  }
};
static_assert(sizeof(DoorbellPage) == 4096 && std::atomic<uint32_t>::is_always_lock_free);

// Signaller: after the word was stored with memory_order_seq_cst.
void ring(Doorbell& bell);
// Wakes every sleeper of the page, whatever it waits for.
void ring_all(DoorbellPage& page);

// Sleeper: announces itself while it lives. `ticket` is read between the announcement and the look
// at the word.
class Sleeper {
 public:
  explicit Sleeper(Doorbell& bell);
  ~Sleeper();
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  uint32_t ticket() const;
  // Returns when the bell rang after `ticket` was read, after `timeout`, or for no reason.
  void sleep(uint32_t ticket, std::chrono::nanoseconds timeout);

 private:
  Doorbell& bell_;
};

}  // namespace tide
