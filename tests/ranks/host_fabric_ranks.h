// Ranks as forked processes for the tests of the host fabric: a store of files, children that
// report by exit status, and bounded waits. The parent stays single-threaded.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

#include "transports/host/host_fabric.h"

namespace tide::test {

using std::chrono::milliseconds;
using std::chrono::seconds;

inline Deadline within(std::chrono::nanoseconds time) { return Clock::now() + time; }

// Keys are files of a directory of its own.
class FileStore : public KeyValueStore {
 public:
  FileStore() {
    char path[] = "/tmp/tide-test-store-XXXXXX";
    directory_ = ::mkdtemp(path);
    std::filesystem::permissions(directory_, std::filesystem::perms::all);
    maker_ = ::getpid();
  }
  ~FileStore() override {
    if (::getpid() == maker_) std::filesystem::remove_all(directory_);
  }

  Status set(const std::string& key, const std::string& value) override {
    const std::string temporary = path_of(key) + "." + std::to_string(::getpid());
    std::ofstream(temporary) << value;
    std::filesystem::rename(temporary, path_of(key));
    return Status::ok();
  }
  Result<std::string> get(const std::string& key, Deadline deadline) override {
    while (true) {
      std::ifstream file(path_of(key));
      if (file) {
        std::ostringstream text;
        text << file.rdbuf();
        return text.str();
      }
      if (Clock::now() >= deadline)
        return Status(ErrorKind::kTimeout, "the store has no key '" + key + "'");
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

 private:
  std::string path_of(std::string key) const {
    for (char& letter : key) {
      if (letter == '/') letter = '+';
    }
    return directory_ + "/" + key;
  }
  std::string directory_;
  pid_t maker_;
};

// Children of one test. What is still alive at the end is killed.
class Processes {
 public:
  ~Processes() {
    for (const auto& [pid, name] : running_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  // Runs `body` in a new process, which ends with 0 when no expectation failed there.
  pid_t start(const std::string& name, const std::function<void()>& body) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
      body();
      std::fflush(nullptr);
      std::exit(::testing::Test::HasFailure() ? 1
                                              : 0);  // not _exit: sanitizers look for leaks here
    }
    running_[pid] = name;
    return pid;
  }

  // All (or one) must end by themselves with 0.
  void expect_success(pid_t pid, seconds time = seconds(120)) {
    const int status = end_of(pid, time);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << "a process ended with status " << status;
  }
  void expect_all_succeed(seconds time = seconds(120)) {
    while (!running_.empty()) expect_success(running_.begin()->first, time);
  }
  void kill(pid_t pid, int signal) { ::kill(pid, signal); }
  // The wait status; a process that does not end is killed, which fails the test.
  int end_of(pid_t pid, seconds time = seconds(120)) {
    const Deadline deadline = within(time);
    int status = 0;
    while (::waitpid(pid, &status, WNOHANG) == 0) {
      if (Clock::now() >= deadline) {
        ADD_FAILURE() << running_[pid] << " did not end";
        ::kill(pid, SIGKILL);
        ::waitpid(pid, &status, 0);
        break;
      }
      std::this_thread::sleep_for(milliseconds(2));
    }
    running_.erase(pid);
    return status;
  }

 private:
  std::map<pid_t, std::string> running_;
};

inline std::unique_ptr<Fabric> connect(int rank, int size, KeyValueStore& store,
                                       HostFabricOptions options = {}) {
  options.rank = rank;
  options.size = size;
  if (options.group.empty()) options.group = "test";
  options.deadline = within(seconds(60));
  auto fabric = connect_host_fabric(options, store);
  EXPECT_TRUE(fabric.is_ok()) << "rank " << rank << ": " << fabric.status().to_string();
  return fabric.is_ok() ? std::move(fabric.value()) : nullptr;
}

inline std::shared_ptr<Window> window_of(Fabric& fabric, int64_t bytes) {
  auto window = fabric.create_window(bytes, within(seconds(60)));
  EXPECT_TRUE(window.is_ok()) << window.status().to_string();
  return window.is_ok() ? window.value() : nullptr;
}

// Runs body(rank, store) in one process per rank; all must succeed.
inline void on_ranks(int ranks, const std::function<void(int, KeyValueStore&)>& body) {
  FileStore store;
  Processes processes;
  for (int rank = 0; rank < ranks; ++rank) {
    processes.start("rank " + std::to_string(rank), [&, rank] { body(rank, store); });
  }
  processes.expect_all_succeed();
}

inline uint32_t* word_at(void* base, int64_t index) {
  return static_cast<uint32_t*>(base) + index * 16;
}

inline WaitGuard guard_of(std::chrono::milliseconds timeout = seconds(30)) {
  WaitGuard guard;
  guard.timeout = timeout;
  guard.what = "the test's word";
  return guard;
}

// Everybody has arrived when it returns. Uses words 64 + rank of a window of at least 8 KiB and up
// to 32 ranks.
inline void barrier(Fabric& fabric, const Window& window, uint32_t epoch) {
  for (int peer = 0; peer < fabric.size(); ++peer) {
    ASSERT_TRUE(fabric.signal(0, word_at(window.peer(peer), 64 + fabric.rank()), epoch).is_ok());
  }
  for (int peer = 0; peer < fabric.size(); ++peer) {
    const Status status = fabric.wait(0, word_at(window.own(), 64 + peer), epoch, guard_of());
    ASSERT_TRUE(status.is_ok()) << status.to_string();
  }
}

// What a fabric's listener heard.
class Heard {
 public:
  void listen(Fabric& fabric) {
    fabric.on_peer_failure([this](int rank, const Status& reason) {
      std::lock_guard lock(mutex_);
      losses_.emplace_back(rank, reason);
    });
  }
  std::vector<std::pair<int, Status>> wait_for(size_t count) {
    const Deadline deadline = within(seconds(60));
    while (Clock::now() < deadline) {
      if (auto now = losses(); now.size() >= count) return now;
      std::this_thread::sleep_for(milliseconds(1));
    }
    ADD_FAILURE() << "heard of " << losses().size() << " losses, wanted " << count;
    return losses();
  }
  std::vector<std::pair<int, Status>> losses() {
    std::lock_guard lock(mutex_);
    return losses_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<int, Status>> losses_;
};

inline size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

}  // namespace tide::test
