#include "transports/ucx/ucx_api.h"

#include <dlfcn.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <mutex>
#include <sstream>

namespace tide {
namespace {

constexpr unsigned kOldest = ucx_version(1, 16);
constexpr const char* kSoname = "libucp.so.0";
// What a crash raises; the application's handlers (faulthandler's, torch's) must stay.
constexpr int kErrorSignals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};

class KeptSignalHandlers {
 public:
  KeptSignalHandlers() {
    for (size_t i = 0; i < std::size(kErrorSignals); ++i)
      sigaction(kErrorSignals[i], nullptr, &kept_[i]);
  }
  ~KeptSignalHandlers() {
    for (size_t i = 0; i < std::size(kErrorSignals); ++i)
      sigaction(kErrorSignals[i], &kept_[i], nullptr);
  }
  KeptSignalHandlers(const KeptSignalHandlers&) = delete;
  KeptSignalHandlers& operator=(const KeptSignalHandlers&) = delete;

 private:
  struct sigaction kept_[std::size(kErrorSignals)];
};

std::string own_maps() {
  std::ifstream file("/proc/self/maps");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

Status two_copies(const std::vector<std::string>& files) {
  return {ErrorKind::kUnsupported, "this process holds more than one UCX (" + joined(files) +
                                       "), and two copies of it hang or corrupt each other; load "
                                       "one only (TIDE_UCX_LIBRARY names a file)"};
}

template <class Function>
void find(void* handle, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(handle, name));
}

void fill(UcxApi& api, void* handle) {
  find(handle, "ucp_get_version", api.get_version);
  find(handle, "ucp_get_version_string", api.get_version_string);
  find(handle, "ucs_status_string", api.status_string);
  find(handle, "ucp_config_read", api.config_read);
  find(handle, "ucp_config_modify", api.config_modify);
  find(handle, "ucp_config_release", api.config_release);
  find(handle, "ucp_init_version", api.init_version);
  find(handle, "ucp_cleanup", api.cleanup);
  find(handle, "ucp_context_query", api.context_query);
  find(handle, "ucp_worker_create", api.worker_create);
  find(handle, "ucp_worker_destroy", api.worker_destroy);
  find(handle, "ucp_worker_query", api.worker_query);
  find(handle, "ucp_worker_release_address", api.worker_release_address);
  find(handle, "ucp_worker_progress", api.worker_progress);
  find(handle, "ucp_worker_get_efd", api.worker_get_efd);
  find(handle, "ucp_worker_arm", api.worker_arm);
  find(handle, "ucp_worker_set_am_recv_handler", api.worker_set_am_recv_handler);
  find(handle, "ucp_ep_create", api.ep_create);
  find(handle, "ucp_ep_close_nbx", api.ep_close_nbx);
  find(handle, "ucp_ep_flush_nbx", api.ep_flush_nbx);
  find(handle, "ucp_ep_query", api.ep_query);
  find(handle, "ucp_ep_rkey_unpack", api.ep_rkey_unpack);
  find(handle, "ucp_rkey_destroy", api.rkey_destroy);
  find(handle, "ucp_mem_map", api.mem_map);
  find(handle, "ucp_mem_unmap", api.mem_unmap);
  find(handle, "ucp_mem_query", api.mem_query);
  find(handle, "ucp_rkey_pack", api.rkey_pack);
  find(handle, "ucp_rkey_buffer_release", api.rkey_buffer_release);
  find(handle, "ucp_put_nbx", api.put_nbx);
  find(handle, "ucp_am_send_nbx", api.am_send_nbx);
  find(handle, "ucp_request_free", api.request_free);
}

// The one file to load: what is loaded, else what was asked for, else the SONAME, else the
// candidates in turn.
Result<void*> open_library(const UcxSearch& search, std::string& chosen) {
  const std::vector<std::string> loaded = ucx_copies(own_maps(), "libucp");
  if (loaded.size() > 1) return two_copies(loaded);
  std::vector<std::string> names;
  if (!loaded.empty()) {
    names = loaded;
    const std::string& file = loaded.front();
    if (file.substr(file.rfind('/') + 1).rfind("libucp.so", 0) != 0) {
      return Status(ErrorKind::kUnsupported,
                    "another package brought its own copy of UCX into this process (" + file +
                        "); tide needs the common one, " + kSoname +
                        ", so run without that package or with one built on it");
    }
  } else if (!search.library.empty()) {
    names = {search.library};
  } else {
    names = {kSoname};
    names.insert(names.end(), search.candidates.begin(), search.candidates.end());
  }
  std::string reasons;
  for (const std::string& name : names) {
    const KeptSignalHandlers kept;
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) {
      chosen = name;
      return handle;
    }
    const char* reason = dlerror();
    reasons += std::string(reasons.empty() ? "" : "; ") + (reason != nullptr ? reason : name);
  }
  return Status(ErrorKind::kUnsupported,
                "no UCX library here (" + reasons +
                    "); install UCX 1.16 or newer, or the package libucx-cu13, or name the file "
                    "in TIDE_UCX_LIBRARY");
}

}  // namespace

unsigned UcxApi::version() const {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  get_version(&major, &minor, &release);
  return ucx_version(major, minor);
}

std::vector<std::string> ucx_copies(const std::string& maps, const std::string& stem) {
  std::vector<std::string> files;
  std::istringstream lines(maps);
  for (std::string line; std::getline(lines, line);) {
    const size_t slash = line.find('/');
    if (slash == std::string::npos) continue;
    const std::string path = line.substr(slash);
    const std::string name = path.substr(path.rfind('/') + 1);
    if (name.rfind(stem, 0) != 0 || name.find(".so") == std::string::npos) continue;
    const char next = name[stem.size()];
    if (next != '.' && next != '-') continue;  // libucs_signal is no libucs
    if (std::find(files.begin(), files.end(), path) == files.end()) files.push_back(path);
  }
  return files;
}

Status check_ucx(const UcxApi& api) {
  const bool complete =
      api.get_version && api.get_version_string && api.status_string && api.config_read &&
      api.config_modify && api.config_release && api.init_version && api.cleanup &&
      api.context_query && api.worker_create && api.worker_destroy && api.worker_query &&
      api.worker_release_address && api.worker_progress && api.worker_get_efd && api.worker_arm &&
      api.worker_set_am_recv_handler && api.ep_create && api.ep_close_nbx && api.ep_flush_nbx &&
      api.ep_query && api.ep_rkey_unpack && api.rkey_destroy && api.mem_map && api.mem_unmap &&
      api.mem_query && api.rkey_pack && api.rkey_buffer_release && api.put_nbx && api.am_send_nbx &&
      api.request_free;
  if (api.get_version != nullptr && api.get_version_string != nullptr && api.version() < kOldest) {
    return {ErrorKind::kUnsupported,
            "UCX " + std::string(api.get_version_string()) + " (" + api.library +
                ") is too old: tide needs 1.16 or newer, which puts without copies"};
  }
  if (!complete) {
    return {ErrorKind::kUnsupported,
            api.library + " lacks functions of UCX 1.16; install UCX 1.16 or newer"};
  }
  return Status::ok();
}

Result<const UcxApi*> load_ucx(const UcxSearch& search) {
  static std::mutex mutex;
  static UcxApi* loaded = nullptr;  // never freed: the library stays until the process ends
  std::lock_guard lock(mutex);
  if (loaded != nullptr) return loaded;
  UcxApi api;
  const Result<void*> handle = open_library(search, api.library);
  if (!handle.is_ok()) return handle.status();
  fill(api, handle.value());
  TIDE_RETURN_IF_ERROR(check_ucx(api));
  const std::string maps = own_maps();
  for (const char* stem : {"libucs", "libucp"}) {
    const std::vector<std::string> files = ucx_copies(maps, stem);
    if (files.size() > 1) return two_copies(files);
    if (files.size() == 1 && std::string(stem) == "libucp") api.library = files.front();
  }
  loaded = new UcxApi(api);
  return loaded;
}

}  // namespace tide
