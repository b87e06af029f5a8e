#include "transports/ucx/rail.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <future>

#include "transports/ucx/configuration.h"
#include "transports/ucx/link.h"

namespace tide {
namespace {

// Older ones emulate there whatever they are told when errors of peers are to be survived, and
// cannot be forbidden to.
constexpr unsigned kTruePutsOverTcp = ucx_version(1, 21);
constexpr int kLongestSleepMs = 100;
constexpr int kClosingSleepMs = 5;
constexpr int kChunksATurn =
    16;  // then progress: a head's flush must not wait for the whole window to be posted

Status system_error(const std::string& what) {
  return {ErrorKind::kSystem, "rail: " + what + " failed: " + std::strerror(errno)};
}

}  // namespace

UcxRail::UcxRail(const UcxRailOptions& options, const UcxApi* api)
    : options_(options),
      api_(api),
      process_(getpid()),
      transfers_(options.window_bytes, options.chunk_bytes) {}

Result<std::shared_ptr<UcxRail>> UcxRail::open(const UcxRailOptions& options, const UcxApi* api) {
  if (options.device.empty()) {
    return Status(ErrorKind::kInvalidUse,
                  "a rail needs a device; TIDE_RAILS names one for each local rank");
  }
  if (options.window_bytes < 1 || options.chunk_bytes < 1) {
    return Status(ErrorKind::kInvalidUse,
                  "a rail needs a window and chunks of at least one byte, got " +
                      std::to_string(options.window_bytes) + " and " +
                      std::to_string(options.chunk_bytes));
  }
  std::shared_ptr<UcxRail> rail(new UcxRail(options, api));
  rail->epoll_ = epoll_create1(EPOLL_CLOEXEC);
  rail->doorbell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = rail->doorbell_;
  if (rail->epoll_ < 0 || rail->doorbell_ < 0 ||
      epoll_ctl(rail->epoll_, EPOLL_CTL_ADD, rail->doorbell_, &event) != 0) {
    return system_error("making its event descriptors");
  }
  // The thread inherits the mask: signals are for the application's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  rail->thread_ = std::thread([raw = rail.get()] { raw->serve(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(rail->thread_.native_handle(), "tide-rail");
  TIDE_RETURN_IF_ERROR(rail->run([raw = rail.get()] { return raw->make_context(); }));
  return rail;
}

UcxRail::~UcxRail() {
  if (getpid() != process_) {  // a forked child: the thread is not there
    thread_.detach();
    return;
  }
  if (thread_.joinable()) {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    post([] {});
    thread_.join();
  }
  if (epoll_ >= 0) ::close(epoll_);
  if (doorbell_ >= 0) ::close(doorbell_);
}

Status UcxRail::make_context() {
  const std::string version = "UCX " + std::string(api_->get_version_string());
  const auto refused = [&](const std::string& what, ucs_status_t status) {
    return Status(ErrorKind::kUnsupported, version + " (" + api_->library + ") refused " + what +
                                               " for device " + options_.device + ": " +
                                               api_->status_string(status));
  };
  if (!options_.rdma && api_->version() < kTruePutsOverTcp) {
    return {ErrorKind::kUnsupported,
            version + " (" + api_->library +
                ") emulates puts over tcp by messages that a dying peer turns into an abort " +
                "of this process; tcp rails need UCX 1.21 or newer, or the package libucx-cu13"};
  }
  ucp_config_t* configuration = nullptr;
  ucs_status_t status = api_->config_read(nullptr, nullptr, &configuration);
  if (status != UCS_OK) return refused("to read its configuration", status);
  UcxConfiguration wanted =
      make_ucx_configuration(options_.device, options_.rdma, api_->version(),
                             [](const char* name) -> const char* { return std::getenv(name); });
  for (const UcxSetting& setting : wanted.settings) {
    status = api_->config_modify(configuration, setting.key.c_str(), setting.value.c_str());
    if (status == UCS_OK) continue;
    if (setting.required || setting.key == "TLS" || setting.key == "NET_DEVICES") {
      api_->config_release(configuration);
      return refused("UCX_" + setting.key + "=" + setting.value, status);
    }
    wanted.notes.push_back(version + " does not know UCX_" + setting.key);
  }
  ucp_params_t parameters = {};
  parameters.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  parameters.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  parameters.name = "tide";
  // The oldest API that has all that is used, so that any library from there on takes it.
  status = api_->init_version(1, 16, &parameters, configuration, &context_);
  api_->config_release(configuration);
  if (status != UCS_OK) {
    context_ = nullptr;
    return refused("to start", status);
  }
  ucp_context_attr_t attributes = {};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (api_->context_query(context_, &attributes) == UCS_OK) {
    // Over tcp UCX would stage GPU memory by itself; that is left to tide's own staging.
    cuda_memory_ = options_.rdma && (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
  }
  notes_ = std::move(wanted.notes);
  return Status::ok();
}

void UcxRail::post(std::function<void()> command) {
  {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  if (asleep_.load(std::memory_order_seq_cst)) {
    const uint64_t one = 1;
    if (write(doorbell_, &one, sizeof one) < 0) return;  // full: it rings already
  }
}

Status UcxRail::run(const std::function<Status()>& command) {
  // Shared: the caller may be gone with the answer while the thread still leaves set_value.
  const auto answer = std::make_shared<std::promise<Status>>();
  post([&command, answer] { answer->set_value(command()); });
  return answer->get_future().get();
}

bool UcxRail::run_commands() {
  std::deque<std::function<void()>> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) command();
  return !commands.empty();
}

void UcxRail::add_link(std::shared_ptr<UcxLink> link) {
  link->set_first_flow(next_flow_);
  next_flow_ += link->nodes();
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = link->descriptor();
  epoll_ctl(epoll_, EPOLL_CTL_ADD, link->descriptor(),
            &event);  // without it the loop's own timeout serves
  links_.push_back(std::move(link));
}

void UcxRail::leave_behind(const UcxLink* link) {
  left_behind_ = true;
  static std::mutex mutex;
  static auto* const never_freed = new std::vector<std::shared_ptr<UcxLink>>;
  const std::lock_guard lock(mutex);
  for (const auto& each : links_) {
    if (each.get() == link) never_freed->push_back(each);
  }
}

void UcxRail::stop_watching(int descriptor) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, descriptor, nullptr);
}

bool UcxRail::post_chunks() {
  int posted = 0;
  int flow = 0;
  Chunk chunk;
  while (posted < kChunksATurn && transfers_.next(&flow, &chunk)) {
    ++posted;
    for (const auto& link : links_) {
      if (flow < link->first_flow() || flow >= link->first_flow() + link->nodes()) continue;
      link->post_chunk(flow, chunk);
      break;
    }
  }
  return posted > 0;
}

void UcxRail::keep_time() {
  const Deadline now = Clock::now();
  for (const auto& link : links_) link->keep_time(now);
  for (size_t i = 0; i < links_.size();) {
    if (links_[i]->is_closed()) {
      links_.erase(links_.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void UcxRail::serve() {
  while (true) {
    bool moved = run_commands();
    for (const auto& link : links_) moved = link->progress() || moved;
    moved = post_chunks() || moved;
    keep_time();
    if (moved) continue;
    {
      std::lock_guard lock(mutex_);
      if (ending_ && commands_.empty() && links_.empty()) break;
    }
    sleep();
  }
  if (context_ != nullptr && !left_behind_) api_->cleanup(context_);
}

void UcxRail::sleep() {
  bool closing = false;
  for (const auto& link : links_) {
    if (!link->arm()) return;
    closing = closing || link->is_closing();
  }
  asleep_.store(true, std::memory_order_seq_cst);
  {
    // post() writes its command before it looks at asleep_; this looks for commands after setting
    // it: one sees the other.
    std::lock_guard lock(mutex_);
    if (!commands_.empty()) {
      asleep_.store(false, std::memory_order_relaxed);
      return;
    }
  }
  epoll_event events[8];
  epoll_wait(epoll_, events, std::size(events), closing ? kClosingSleepMs : kLongestSleepMs);
  asleep_.store(false, std::memory_order_relaxed);
  uint64_t rings = 0;
  if (read(doorbell_, &rings, sizeof rings) < 0) return;  // not rung
}

}  // namespace tide
