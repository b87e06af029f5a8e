#include "transports/host/host_window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "transports/host/memory_room.h"
#include "transports/host/message.h"

namespace tide {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string describe(int64_t bytes) { return "a window of " + std::to_string(bytes) + " bytes"; }

// Growing a file past this limit does not only fail, it sends a signal that ends the process.
Status check_file_size_limit(int64_t bytes) {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<rlim_t>(bytes) > limit.rlim_cur) {
    return {ErrorKind::kSystem, describe(bytes) + ": the limit of file sizes is " +
                                    std::to_string(limit.rlim_cur) +
                                    " bytes (raise it, ulimit -f)"};
  }
  return Status::ok();
}

// Left to the rest of the machine.
constexpr int64_t kReserveBytes = 64 << 20;

// See memory_room.h: the kernel would not refuse.
Status check_memory_room(int64_t wanted, int ranks, const std::string& what) {
  const int64_t room = std::max<int64_t>(0, memory_room_bytes() - kReserveBytes);
  if (wanted <= room / ranks) return Status::ok();
  return {ErrorKind::kSystem, "no memory for " + what + " on each of " + std::to_string(ranks) +
                                  " ranks: " + std::to_string(room) + " bytes are available here"};
}

Status allocate_pages(int fd, int64_t bytes, int ranks) {
  constexpr int64_t kStep = 64 << 20;  // a signal interrupts and undoes a step, never everything
  TIDE_RETURN_IF_ERROR(check_memory_room(bytes, ranks, describe(bytes)));
  for (int64_t done = 0; done < bytes;) {
    const int64_t step = std::min(kStep, bytes - done);
    // Again, as others take memory meanwhile.
    if (done > 0)
      TIDE_RETURN_IF_ERROR(check_memory_room(step, ranks, "the rest of " + describe(bytes)));
    if (::fallocate(fd, 0, done, step) == 0) {
      done += step;
    } else if (errno != EINTR) {
      return system_error("no memory for " + describe(bytes));
    }
  }
  return Status::ok();
}

}  // namespace

Result<Descriptor> make_window_part(int64_t bytes, int ranks) {
  if (bytes <= 0) return Status(ErrorKind::kInvalidUse, describe(bytes));
  TIDE_RETURN_IF_ERROR(check_file_size_limit(bytes));
  Descriptor part = Descriptor::record(
      [] { return ::memfd_create("tide-window", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  if (!part) return system_error("making " + describe(bytes));
  TIDE_RETURN_IF_ERROR(allocate_pages(part.get(), bytes, ranks));
  if (::fcntl(part.get(), F_ADD_SEALS, kSizeSeals) != 0)
    return system_error("sealing " + describe(bytes));
  return part;
}

Status check_window_part(const Descriptor& part, int64_t bytes) {
  if (!part) {
    return {ErrorKind::kSystem,
            "the descriptor of " + describe(bytes) +
                " did not arrive (no free descriptor? raise the limit of open files, ulimit -n)"};
  }
  struct stat facts = {};
  if (::fstat(part.get(), &facts) != 0) return system_error("looking at " + describe(bytes));
  const int seals = ::fcntl(part.get(), F_GET_SEALS);
  if (facts.st_size != bytes || seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    return {ErrorKind::kInternal, describe(bytes) + " arrived with " +
                                      std::to_string(facts.st_size) + " bytes, or unsealed"};
  }
  return Status::ok();
}

Result<std::shared_ptr<HostWindow>> HostWindow::map(const std::vector<const Descriptor*>& parts,
                                                    int rank, int64_t bytes,
                                                    std::shared_ptr<WindowMap> map) {
  const int64_t stride = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const auto total = static_cast<size_t>(stride) * parts.size();
  Status failure;
  void* base = MAP_FAILED;
  with_fork_held([&] {  // a child forked between the mapping and the advice would see the window
    base = ::mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      failure = system_error("no address space for " + describe(bytes));
      return;
    }
    for (size_t i = 0; i < parts.size() && failure.is_ok(); ++i) {
      void* at = static_cast<char*>(base) + static_cast<int64_t>(i) * stride;
      if (::mmap(at, static_cast<size_t>(stride), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                 parts[i]->get(), 0) == MAP_FAILED) {
        failure =
            system_error("mapping rank " + std::to_string(i) + "'s part of " + describe(bytes));
      }
    }
    if (failure.is_ok() && ::madvise(base, total, MADV_DONTFORK) != 0) {
      failure = system_error("keeping " + describe(bytes) + " from forked children");
    }
    if (!failure.is_ok()) ::munmap(base, total);
  });
  if (!failure.is_ok()) return failure;
  return std::shared_ptr<HostWindow>(new HostWindow(static_cast<char*>(base), stride,
                                                    static_cast<int>(parts.size()), rank, bytes,
                                                    std::move(map)));
}

HostWindow::HostWindow(char* base, int64_t stride, int ranks, int rank, int64_t bytes,
                       std::shared_ptr<WindowMap> map)
    : base_(base),
      stride_(stride),
      ranks_(ranks),
      rank_(rank),
      bytes_(bytes),
      owner_(::getpid()),
      map_(std::move(map)) {
  map_->add(base_, ranks_, bytes_, stride_);
}

HostWindow::~HostWindow() {
  if (::getpid() != owner_) return;
  map_->remove(base_);
  ::munmap(base_, static_cast<size_t>(stride_) * static_cast<size_t>(ranks_));
}

}  // namespace tide
