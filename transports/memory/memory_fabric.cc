#include "transports/memory/memory_fabric.h"

#include <sys/mman.h>

#include <condition_variable>
#include <map>
#include <optional>
#include <thread>

#include "transports/host/blocking_fabric.h"

namespace tide {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr std::chrono::milliseconds kSlice{100};

// All ranks' parts of one window; freed with the last rank's Window.
class SharedPages {
 public:
  static std::shared_ptr<SharedPages> make(int ranks, int64_t bytes) {
    const int64_t stride = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    const auto total = static_cast<size_t>(stride * ranks);
    void* base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    return std::shared_ptr<SharedPages>(new SharedPages(static_cast<char*>(base), stride, total));
  }
  ~SharedPages() { munmap(base_, total_); }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  char* part(int rank) const { return base_ + rank * stride_; }
  int64_t stride() const { return stride_; }

 private:
  SharedPages(char* base, int64_t stride, size_t total)
      : base_(base), stride_(stride), total_(total) {}

  char* base_;
  int64_t stride_;
  size_t total_;
};

// Addresses that stand for all ranks' parts of a window: nothing is mapped there.
class OpenWindows {
 public:
  void* add(std::shared_ptr<SharedPages> pages) {
    void* base = mmap(nullptr, static_cast<size_t>(pages->stride()), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    std::lock_guard lock(mutex_);
    open_[static_cast<char*>(base)] = std::move(pages);
    return base;
  }
  void remove(void* base) {
    std::lock_guard lock(mutex_);
    const auto found = open_.find(static_cast<char*>(base));
    munmap(base, static_cast<size_t>(found->second->stride()));
    open_.erase(found);
  }
  // Of every rank, by rank; none where the address stands for nothing.
  std::vector<char*> members(const void* address, int ranks) const {
    const char* at = static_cast<const char*>(address);
    std::lock_guard lock(mutex_);
    auto after = open_.upper_bound(const_cast<char*>(at));
    if (after == open_.begin()) return {};
    --after;
    if (at - after->first >= after->second->stride()) return {};
    std::vector<char*> members;
    for (int rank = 0; rank < ranks; ++rank)
      members.push_back(after->second->part(rank) + (at - after->first));
    return members;
  }

 private:
  mutable std::mutex mutex_;
  std::map<char*, std::shared_ptr<SharedPages>> open_;
};

class MemoryWindow : public Window {
 public:
  MemoryWindow(std::shared_ptr<SharedPages> pages, std::shared_ptr<WindowMap> map, int rank,
               int ranks, int64_t bytes)
      : pages_(std::move(pages)), map_(std::move(map)), rank_(rank), bytes_(bytes) {
    map_->add(pages_->part(0), ranks, bytes_, pages_->stride());
  }
  ~MemoryWindow() override {
    if (all_ != nullptr) open_->remove(all_);
    map_->remove(pages_->part(0));
  }

  int64_t bytes() const override { return bytes_; }
  void* own() const override { return pages_->part(rank_); }
  void* peer(int rank) const override { return pages_->part(rank); }
  void* all() const override { return all_; }
  void open(std::shared_ptr<OpenWindows> open) {
    open_ = std::move(open);
    all_ = open_->add(pages_);
  }

 private:
  std::shared_ptr<SharedPages> pages_;
  std::shared_ptr<WindowMap> map_;
  int rank_;
  int64_t bytes_;
  std::shared_ptr<OpenWindows> open_;
  void* all_ = nullptr;
};

// One collective create_window or open_to_all: the ranks meet, the last one decides for all; one
// that gives up decides, too.
struct Meeting {
  int arrived = 0;
  int64_t bytes = 0;
  Status refusal;
  int refusing_rank = -1;
  std::optional<Status> decision;
  std::shared_ptr<SharedPages> pages;

  void refuse(int rank, const Status& reason) {  // the lowest refusing rank's reason stands
    if (refusing_rank >= 0 && refusing_rank < rank) return;
    refusing_rank = rank;
    refusal = {reason.kind(), "rank " + std::to_string(rank) + ": " + reason.message()};
  }
};

class MemoryFabric;

struct MemoryGroup {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<MemoryFabric*> members;  // null once closed
  std::map<int64_t, std::shared_ptr<Meeting>> meetings;
  MemoryFabricOptions options;
};

class MemoryFabric : public BlockingFabric {
 public:
  MemoryFabric(std::shared_ptr<MemoryGroup> group, const std::shared_ptr<SharedPages>& doorbells,
               int rank, int size)
      : BlockingFabric(rank, size, capabilities_of(*group), "rank " + std::to_string(rank)),
        group_(std::move(group)) {
    set_doorbells(std::make_shared<MemoryWindow>(doorbells, std::make_shared<WindowMap>(), rank,
                                                 size, static_cast<int64_t>(sizeof(DoorbellPage))));
    service_ = std::thread([this] { serve(); });
  }
  ~MemoryFabric() override { close(); }

  Result<std::shared_ptr<Window>> create_window(int64_t bytes, Deadline deadline) override;
  Status open_to_all(Window& window, Deadline deadline) override;
  Status copy(int queue, const CopyBlock* blocks, int count) override;
  Status read_add(int queue, const ReadAddBlock* blocks, int count,
                  const AccumulateOptions& options) override;
  void fail(const Status& reason) override;
  void close() override { leave(&MemoryFabric::mark_left); }
  void break_off() {
    leave([](MemoryFabric& peer, int rank) {
      peer.mark_lost(
          rank, {ErrorKind::kPeerLost, peer.label() + ": rank " + std::to_string(rank) + " died"});
    });
  }

 protected:
  Status usable() const override {
    if (!closed_.load(std::memory_order_relaxed)) return Status::ok();
    return {ErrorKind::kInvalidUse, label() + ": the fabric is closed"};
  }
  void poke_service() override {
    std::lock_guard lock(service_mutex_);
    poked_ = true;
    service_changed_.notify_one();
  }

 private:
  template <class Tell>
  void for_each_peer(Tell tell) {  // group mutex held: a peer cannot be destroyed meanwhile
    for (MemoryFabric* peer : group_->members) {
      if (peer != nullptr && peer != this) tell(*peer);
    }
  }

  template <class Tell>
  void leave(Tell tell) {
    {
      std::lock_guard lock(group_->mutex);
      if (closed_.exchange(true)) return;
      group_->members[static_cast<size_t>(rank())] = nullptr;
      for_each_peer([&](MemoryFabric& peer) { std::invoke(tell, peer, rank()); });
      group_->changed.notify_all();
    }
    {
      std::lock_guard lock(service_mutex_);
      ending_ = true;
      service_changed_.notify_one();
    }
    service_.join();
  }

  void serve() {
    std::unique_lock lock(service_mutex_);
    while (true) {
      service_changed_.wait(lock, [this] { return poked_ || ending_; });
      if (ending_) return;
      poked_ = false;
      lock.unlock();
      deliver_losses();
      lock.lock();
    }
  }

  static Capabilities capabilities_of(const MemoryGroup& group) {
    Capabilities capabilities = {.kind = "memory"};
    capabilities.multicast = capabilities.differs_by_node = group.options.multicast;
    return capabilities;
  }

  // All ranks come, or the error is everybody's; `own` is this rank's refusal.
  Result<std::shared_ptr<Meeting>> meet(int64_t bytes, const Status& own, bool makes_pages,
                                        Deadline deadline);
  void arrive(Meeting& meeting, int64_t bytes, const Status& own, bool makes_pages);

  const std::shared_ptr<MemoryGroup> group_;
  const std::shared_ptr<OpenWindows> open_windows_ = std::make_shared<OpenWindows>();
  std::atomic<bool> closed_{false};
  int64_t next_meeting_ = 0;

  std::mutex service_mutex_;
  std::condition_variable service_changed_;
  bool poked_ = false;
  bool ending_ = false;
  std::thread service_;
};

void MemoryFabric::arrive(Meeting& meeting, int64_t bytes, const Status& own, bool makes_pages) {
  if (!own.is_ok()) meeting.refuse(rank(), own);
  if (bytes <= 0)
    meeting.refuse(rank(),
                   {ErrorKind::kInvalidUse, "a window of " + std::to_string(bytes) + " bytes"});
  if (meeting.arrived == 0) meeting.bytes = bytes;
  if (meeting.bytes != bytes) {
    meeting.refuse(rank(), {ErrorKind::kInvalidUse, "wants a window of " + std::to_string(bytes) +
                                                        " bytes where another rank wants " +
                                                        std::to_string(meeting.bytes)});
  }
  if (++meeting.arrived < size()) return;
  if (meeting.refusal.is_ok() && makes_pages) {
    meeting.pages = SharedPages::make(size(), bytes);
    if (!meeting.pages) {
      meeting.refuse(rank(), {ErrorKind::kSystem,
                              "no memory for a window of " + std::to_string(bytes) + " bytes"});
    }
  }
  if (!meeting.decision) meeting.decision = meeting.refusal;
}

Result<std::shared_ptr<Window>> MemoryFabric::create_window(int64_t bytes, Deadline deadline) {
  const auto& refuse = group_->options.refuse_window;
  const Status own = refuse ? refuse(rank(), bytes) : Status::ok();
  Result<std::shared_ptr<Meeting>> meeting = meet(bytes, own, true, deadline);
  if (!meeting.is_ok()) return meeting.status();
  return std::shared_ptr<Window>(
      std::make_shared<MemoryWindow>(meeting.value()->pages, window_map(), rank(), size(), bytes));
}

Status MemoryFabric::open_to_all(Window& window, Deadline deadline) {
  const auto& refuse = group_->options.refuse_multicast;
  Status own = refuse ? refuse(rank()) : Status::ok();
  if (!capabilities().multicast) own = {ErrorKind::kUnsupported, capabilities().no_multicast};
  TIDE_RETURN_IF_ERROR(meet(window.bytes(), own, false, deadline).status());
  static_cast<MemoryWindow&>(window).open(open_windows_);
  return Status::ok();
}

Status MemoryFabric::copy(int queue, const CopyBlock* blocks, int count) {
  if (!capabilities().multicast) return BlockingFabric::copy(queue, blocks, count);
  for (int i = 0; i < count; ++i) {
    CopyBlock block = blocks[i];
    std::vector<char*> members = open_windows_->members(block.to, size());
    if (members.empty()) members.push_back(static_cast<char*>(block.to));
    for (char* member : members) {
      block.to = member;  // the place it is read from holds it already
      if (member != block.from) TIDE_RETURN_IF_ERROR(BlockingFabric::copy(queue, &block, 1));
    }
  }
  return Status::ok();
}

// The twin of kernels/combine.cu: what it reads through a switch is added here.
Status MemoryFabric::read_add(int queue, const ReadAddBlock* blocks, int count,
                              const AccumulateOptions& options) {
  for (int i = 0; i < count; ++i) {
    AccumulateBlock sum;
    for (const char* member : open_windows_->members(blocks[i].from, size()))
      sum.slices.push_back(member);
    if (sum.slices.empty())
      return {ErrorKind::kInternal, label() + ": a read-add outside every window opened to all"};
    sum.output = blocks[i].output;
    sum.numel = blocks[i].numel;
    sum.output_dtype = blocks[i].output_dtype;
    TIDE_RETURN_IF_ERROR(accumulate(queue, &sum, 1, options));
  }
  return Status::ok();
}

Result<std::shared_ptr<Meeting>> MemoryFabric::meet(int64_t bytes, const Status& own,
                                                    bool makes_pages, Deadline deadline) {
  TIDE_RETURN_IF_ERROR(usable());
  std::unique_lock lock(group_->mutex);
  const int64_t number = next_meeting_++;
  auto& entry = group_->meetings[number];
  if (!entry) entry = std::make_shared<Meeting>();
  const std::shared_ptr<Meeting> meeting = entry;
  arrive(*meeting, bytes, own, makes_pages);
  while (!meeting->decision) {
    const Status missing = first_missing_peer();
    const Deadline now = Clock::now();
    if (!missing.is_ok()) {
      meeting->decision = missing;
    } else if (now >= deadline) {
      meeting->decision =
          Status(ErrorKind::kTimeout, label() + ": " + std::to_string(meeting->arrived) + " of " +
                                          std::to_string(size()) +
                                          " ranks came to create a window before the deadline");
    } else {
      group_->changed.wait_until(lock, std::min(deadline, now + kSlice));
    }
  }
  group_->changed.notify_all();
  if (meeting->arrived == size()) group_->meetings.erase(number);
  if (!meeting->decision->is_ok()) return *meeting->decision;
  return meeting;
}

void MemoryFabric::fail(const Status& reason) {
  std::lock_guard lock(group_->mutex);
  if (closed_.load()) return;
  for_each_peer([&](MemoryFabric& peer) {
    peer.mark_lost(rank(),
                   {ErrorKind::kPeerLost, peer.label() + ": rank " + std::to_string(rank()) +
                                              " reported: " + reason.to_string()});
  });
  group_->changed.notify_all();
}

}  // namespace

std::vector<std::unique_ptr<Fabric>> make_memory_fabrics(int ranks,
                                                         const MemoryFabricOptions& options) {
  auto group = std::make_shared<MemoryGroup>();
  group->options = options;
  std::vector<std::unique_ptr<Fabric>> fabrics;
  const auto doorbells = SharedPages::make(ranks, static_cast<int64_t>(sizeof(DoorbellPage)));
  if (!doorbells) return fabrics;
  std::lock_guard lock(group->mutex);
  for (int rank = 0; rank < ranks; ++rank) {
    auto fabric = std::make_unique<MemoryFabric>(group, doorbells, rank, ranks);
    group->members.push_back(fabric.get());
    fabrics.push_back(std::move(fabric));
  }
  return fabrics;
}

void break_memory_fabric(Fabric& fabric) { static_cast<MemoryFabric&>(fabric).break_off(); }

}  // namespace tide
