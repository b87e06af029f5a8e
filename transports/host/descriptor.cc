#include "transports/host/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>

namespace tide {
namespace {

struct Record {
  std::mutex mutex;
  std::set<int> open;
};

Record& the_record();

void before_fork() { the_record().mutex.lock(); }
void after_fork_in_parent() { the_record().mutex.unlock(); }
void after_fork_in_child() {
  for (int fd : the_record().open) ::close(fd);
  the_record().open.clear();
  the_record().mutex.unlock();
}

Record& the_record() {
  // Never destroyed: descriptors of static objects may be closed after everything else.
  static Record* const record = [] {
    auto* made = new Record;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return made;
  }();
  return *record;
}

}  // namespace

Descriptor Descriptor::record(const std::function<int()>& make) {
  Descriptor made;
  Record& record = the_record();
  std::lock_guard lock(record.mutex);
  made.fd_ = make();
  const int error = errno;
  if (made.fd_ >= 0) record.open.insert(made.fd_);
  errno = error;
  return made;
}

void Descriptor::reset() {
  if (fd_ < 0) return;
  Record& record = the_record();
  std::lock_guard lock(record.mutex);
  if (record.open.erase(fd_) > 0) ::close(fd_);
  fd_ = -1;
}

void with_fork_held(const std::function<void()>& action) {
  std::lock_guard lock(the_record().mutex);
  action();
}

}  // namespace tide
