// What create_window waits for: every other rank's message, whatever became of its sender since.
#include "transports/host/mailbox.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace tide {
namespace {

Message verdict_of(int rank) {
  Message message;
  message.kind = MessageKind::kWindowVerdict;
  message.rank = rank;
  message.sequence = 1;
  return message;
}

Deadline soon() { return Clock::now() + std::chrono::seconds(20); }

Status left(int rank) { return {ErrorKind::kPeerLost, "rank " + std::to_string(rank) + " left"}; }

TEST(Mailbox, ARankThatLeftAfterItsMessageIsNotMissed) {
  Mailbox mailbox(2, 3, "rank 2", RankNames());
  mailbox.put(verdict_of(1));
  bool asked = false;
  std::thread late;
  auto missing = [&](int rank) {
    if (!asked) late = std::thread([&] { mailbox.put(verdict_of(0)); });
    asked = true;
    return rank == 1 ? left(1) : Status::ok();
  };
  auto verdicts = mailbox.take_all(MessageKind::kWindowVerdict, 1, soon(), missing);
  ASSERT_TRUE(asked);
  late.join();
  ASSERT_TRUE(verdicts.is_ok()) << verdicts.status().message();
  EXPECT_EQ(verdicts.value()[1].rank, 1);
}

TEST(Mailbox, ARankThatLeftWithoutItsMessageEndsTheWait) {
  Mailbox mailbox(2, 3, "rank 2", RankNames());
  mailbox.put(verdict_of(1));
  auto missing = [](int rank) { return rank == 0 ? left(0) : Status::ok(); };
  auto verdicts = mailbox.take_all(MessageKind::kWindowVerdict, 1, soon(), missing);
  ASSERT_FALSE(verdicts.is_ok());
  EXPECT_EQ(verdicts.status().message(), "rank 0 left");
}

}  // namespace
}  // namespace tide
