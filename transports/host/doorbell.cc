#include "transports/host/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace tide {
namespace {

// Not the private kind: sleeper and signaller may be different processes.
void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void ring(Doorbell& bell) {
  if (bell.waiters.load(std::memory_order_seq_cst) == 0) return;
  bell.sequence.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(bell.sequence);
}

void ring_all(DoorbellPage& page) {
  for (Doorbell& bell : page.bells) ring(bell);
}

Sleeper::Sleeper(Doorbell& bell) : bell_(bell) {
  bell_.waiters.fetch_add(1, std::memory_order_seq_cst);
}

Sleeper::~Sleeper() { bell_.waiters.fetch_sub(1, std::memory_order_seq_cst); }

uint32_t Sleeper::ticket() const { return bell_.sequence.load(std::memory_order_seq_cst); }

void Sleeper::sleep(uint32_t ticket, std::chrono::nanoseconds timeout) {
  if (timeout.count() <= 0) return;
  timespec duration;
  duration.tv_sec = static_cast<time_t>(timeout.count() / 1'000'000'000);
  duration.tv_nsec = static_cast<long>(timeout.count() % 1'000'000'000);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell_.sequence), FUTEX_WAIT, ticket, &duration,
          nullptr, 0);
}

}  // namespace tide
