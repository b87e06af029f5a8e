// The backend's frame: inner backends, groups, lifetime. The operations are in delegation.cc.
#include "backend/c10d/process_group_tide.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "backend/c10d/errors.h"
#include "backend/c10d/streams.h"
#include "backend/c10d/work_all.h"

namespace tide {
namespace {

GatherSchedule schedule_of(const std::string& word) {
  for (const auto schedule :
       {GatherSchedule::kDoubling, GatherSchedule::kRing, GatherSchedule::kDirect}) {
    if (word == gather_schedule_name(schedule)) return schedule;
  }
  TORCH_CHECK(false, "no schedule is called '", word, "'; doubling, ring and direct are");
}

Pacing pacing_of(const std::string& word) {
  if (word == "confirm_head") return Pacing::kConfirmHead;
  if (word == "confirm_whole") return Pacing::kConfirmWhole;
  if (word == "grant") return Pacing::kGrant;
  if (word == "off") return Pacing::kOff;
  TORCH_CHECK(false, "no pacing is called '", word,
              "'; confirm_head, confirm_whole, grant and off are");
}

EngineLinkOptions engine_options(const OptionsTide& options, int rank, int size,
                                 const std::shared_ptr<StoreAdapter>& adapter) {
  EngineLinkOptions link;
  link.group.name = options.group_name;
  link.group.timeout = options.timeout;
  link.group.staging_slice_bytes = options.staging_slice_bytes;
  link.group.landing_slice_bytes = options.landing_slice_bytes;
  link.group.arena_limit_bytes = options.arena_limit_bytes;
  link.group.flight_record_size = static_cast<int>(options.flight_record_size);
  link.group.interrupted = [adapter] { return adapter->look_for_interrupt(); };
  link.rank = rank;
  link.size = size;
  // Empty in the default group, whose ranks are the program's.
  const std::vector<uint64_t>& program_ranks = options.global_ranks_in_group;
  link.program_rank = program_ranks.size() == static_cast<size_t>(size)
                          ? static_cast<int>(program_ranks[static_cast<size_t>(rank)])
                          : rank;
  link.node_size = options.node_size;
  link.multicast = options.multicast != "0";
  link.group.rail_gather.schedule = schedule_of(options.schedule);
  link.group.rail_gather.pacing = pacing_of(options.pacing);
  link.group.rail_gather.head_bytes = options.head_bytes;
  link.rail = {options.rails, options.ucx_library, options.ucx_candidates};
  return link;
}

// Where inner backends are kept. One serves both devices where it has one name for both, as in
// c10d.
std::string place_of(const OptionsTide& options, const std::string& device_type) {
  return options.inner_cpu == options.inner_cuda ? "cpu" : device_type;
}

}  // namespace

ProcessGroupTide::ProcessGroupTide(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                   c10::intrusive_ptr<OptionsTide> options, PythonEdge edge)
    : c10d::Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      edge_(std::move(edge)),
      process_(getpid()),
      adapter_(std::make_shared<StoreAdapter>(store_, edge_.check_signals)),
      engines_(engine_options(*options_, rank, size, adapter_), adapter_,
               [](int) { empty_allocator_cache(); }) {}

ProcessGroupTide::~ProcessGroupTide() {
  if (getpid() != process_) {
    // A forked child: the inner backends' threads live in the parent, and joining them would wait
    // for ever.
    new std::map<std::string, BackendPointer>(std::move(inners_));
    return;
  }
  drop_inners();
}

void ProcessGroupTide::check_own_process() const {
  throw_if_error(check_process(process_, options_->group_name));
}

BackendPointer ProcessGroupTide::inner(const std::string& device_type) {
  check_own_process();
  const std::string place = place_of(*options_, device_type);
  std::lock_guard<std::mutex> lock(inner_mutex_);
  auto found = inners_.find(place);
  if (found != inners_.end()) return found->second;
  BackendPointer made = edge_.make_inner(place);
  TORCH_CHECK(made, "tide group '", options_->group_name, "' has no inner backend for ",
              device_type, " tensors");
  made->setGroupUid(getGroupUid());
  made->setGroupDesc(getGroupDesc());
  auto bound = getBoundDeviceId();
  if (bound && c10::DeviceTypeName(bound->type(), true) == device_type)
    made->setBoundDeviceId(bound);
  inners_.emplace(place, made);
  return made;
}

BackendPointer ProcessGroupTide::inner_if_made(const std::string& device_type) const {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  auto found = inners_.find(place_of(*options_, device_type));
  return found == inners_.end() ? nullptr : found->second;
}

std::vector<BackendPointer> ProcessGroupTide::inners_made() const {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  std::vector<BackendPointer> made;
  for (const auto& entry : inners_) made.push_back(entry.second);
  return made;
}

void ProcessGroupTide::drop_inners() {
  auto drop = [this] {
    engines_.close();
    kept_->sweep(true);
    std::map<std::string, BackendPointer> dropped;
    {
      std::lock_guard<std::mutex> lock(inner_mutex_);
      dropped.swap(inners_);
    }
    coalescing_inner_.reset();
    dropped.clear();
  };
  if (edge_.without_gil) {
    edge_.without_gil(drop);
  } else {
    drop();
  }
}

void ProcessGroupTide::startCoalescing() {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  TORCH_CHECK(!coalescing_, "tide group '", options_->group_name,
              "': coalescing regions do not nest");
  coalescing_ = true;
}

WorkPointer ProcessGroupTide::endCoalescing() {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  TORCH_CHECK(coalescing_, "tide group '", options_->group_name,
              "': endCoalescing without startCoalescing");
  coalescing_ = false;
  std::vector<WorkPointer> works = std::exchange(coalesced_works_, {});
  if (BackendPointer inner = std::exchange(coalescing_inner_, nullptr)) {
    if (WorkPointer work = inner->endCoalescing()) works.push_back(std::move(work));
  }
  if (works.empty()) return nullptr;
  if (works.size() == 1) return works.front();
  return c10::make_intrusive<WorkAll>(getRank(), std::move(works));
}

WorkPointer ProcessGroupTide::tracked(WorkPointer work) {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (coalescing_ && work) coalesced_works_.push_back(work);
  return work;
}

BackendPointer ProcessGroupTide::split(const c10::intrusive_ptr<c10d::Store>& store,
                                       const std::vector<int>& ranks,
                                       const c10::intrusive_ptr<Options>& options) {
  auto position = std::find(ranks.begin(), ranks.end(), getRank());
  if (position == ranks.end()) return nullptr;
  return edge_.make_child(store, static_cast<int>(position - ranks.begin()),
                          static_cast<int>(ranks.size()), options);
}

void ProcessGroupTide::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  engines_.set_timeout(timeout);
  for (const auto& inner : inners_made()) inner->setTimeout(timeout);
}

void ProcessGroupTide::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  for (const auto& inner : inners_made()) {
    inner->setGroupUid(uid);
    inner->setGroupDesc(getGroupDesc());
  }
}

void ProcessGroupTide::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cpu()) inner("cuda")->eagerConnectSingleDevice(device);
}

void ProcessGroupTide::setSequenceNumberForGroup() {}

uint64_t ProcessGroupTide::getSequenceNumberForGroup() {
  BackendPointer cuda = inner_if_made("cuda");
  return (cuda ? cuda : inner("cpu"))->getSequenceNumberForGroup();
}

void ProcessGroupTide::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  inner("cuda")->registerOnCompletionHook(std::move(hook));
}

void ProcessGroupTide::waitForPendingWorks() {
  if (BackendPointer cuda = inner_if_made("cuda")) cuda->waitForPendingWorks();
}

void ProcessGroupTide::enableCollectivesTiming() {
  for (const auto& inner : inners_made()) inner->enableCollectivesTiming();
}

c10d::ErrorType ProcessGroupTide::getError() {
  for (const std::shared_ptr<Group>& group : engines_.made()) {
    const ErrorKind kind = group->error().kind();
    if (kind == ErrorKind::kTimeout) return c10d::ErrorType::TIMEOUT;
    if (kind == ErrorKind::kPeerLost) return c10d::ErrorType::REMOTE_ERROR;
    if (kind != ErrorKind::kOk) return c10d::ErrorType::COMM_ERROR;
  }
  for (const auto& inner : inners_made()) {
    c10d::ErrorType error = inner->getError();
    if (error != c10d::ErrorType::SUCCESS) return error;
  }
  return c10d::ErrorType::SUCCESS;
}

std::shared_ptr<c10::Allocator> ProcessGroupTide::getMemAllocator() {
  return inner("cuda")->getMemAllocator();
}

at::Tensor ProcessGroupTide::allocateTensor(long size, at::TensorOptions options) {
  return inner(options.device().is_cpu() ? "cpu" : "cuda")->allocateTensor(size, options);
}

bool ProcessGroupTide::supportsTensorAlloc(c10::DeviceIndex device_index) {
  BackendPointer cuda = inner_if_made("cuda");
  return cuda && cuda->supportsTensorAlloc(device_index);
}

void ProcessGroupTide::abort() {
  const Status reason(ErrorKind::kPeerLost, where("abort") + ": the process group was aborted");
  adapter_->stop(reason);
  engines_.abort(reason);
  engines_.close();
  for (const auto& inner : inners_made()) inner->abort();
}

void ProcessGroupTide::shutdown() {
  adapter_->stop(
      Status(ErrorKind::kPeerLost, where("shutdown") + ": the process group was destroyed"));
  engines_.close();
  for (const auto& inner : inners_made()) inner->shutdown();
}

#if TIDE_TORCH_MINOR >= 15
void ProcessGroupTide::startTimeEstimate() { inner("cuda")->startTimeEstimate(); }

float ProcessGroupTide::endTimeEstimate() { return inner("cuda")->endTimeEstimate(); }
#endif

#if TIDE_TORCH_MINOR >= 14
bool ProcessGroupTide::supportsTimeEstimation() const {
  BackendPointer cuda = inner_if_made("cuda");
  return cuda && cuda->supportsTimeEstimation();
}

void ProcessGroupTide::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& inner : inners_made()) inner->addEphemeralTimeout(timeout);
}

void ProcessGroupTide::setBoundDeviceId(std::optional<at::Device> device) {
  c10d::Backend::setBoundDeviceId(device);
  BackendPointer cuda = inner_if_made("cuda");
  if (cuda && device && !device->is_cpu()) cuda->setBoundDeviceId(device);
}

void ProcessGroupTide::suspend() { inner("cuda")->suspend(); }

void ProcessGroupTide::resume() { inner("cuda")->resume(); }

std::unordered_map<std::string, uint64_t> ProcessGroupTide::getMemoryStats() {
  return inner("cuda")->getMemoryStats();
}
#endif

}  // namespace tide
