#include "tests/network/fake_ucx.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>

namespace tide {
namespace {

struct Worker;
struct Endpoint {
  Worker* from = nullptr;
  Worker* to = nullptr;
  ucp_err_handler_t on_error = {};
  uint64_t puts = 0;          // posted
  std::set<uint64_t> flying;  // not landed
  bool broken = false;
};
struct FlyingPut {
  Endpoint* endpoint = nullptr;
  uint64_t number = 0;
  std::string bytes;
  char* to = nullptr;
};
struct Request {
  Endpoint* endpoint = nullptr;
  ucp_send_nbx_callback_t done = nullptr;
  void* user_data = nullptr;
  uint64_t flush_of = 0;  // ends when no put up to this one flies; 0: ends at the next progress
};
struct Worker {
  int descriptor = -1;
  ucp_am_recv_callback_t on_message = nullptr;
  void* argument = nullptr;
  std::vector<Request*> requests;
  std::vector<FlyingPut> puts;
  std::deque<std::pair<std::string, std::string>> messages;
  std::vector<std::pair<Endpoint*, ucs_status_t>> errors;
};

struct State {
  std::mutex mutex;
  FakeUcxBehaviour behaviour;
  std::mt19937_64 random;
  std::map<std::string, std::string> settings;
  std::vector<Worker*> workers;  // in order of creation; null once destroyed
  std::vector<Endpoint*> endpoints;
  std::vector<std::unique_ptr<Worker>> all_workers;  // peers and requests name them to the end
  std::vector<std::unique_ptr<Endpoint>> all_endpoints;
  std::vector<const void*> made;
  int live = 0;
};
// Never freed, and nothing in it is: what a test leaves hanging on purpose is no leak.
State& state() {
  static State& the_state = *new State;
  return the_state;
}
using Lock = std::lock_guard<std::mutex>;

template <class Handle, class Object>
Handle as(Object* object) {
  return reinterpret_cast<Handle>(object);
}
Worker* worker_of(ucp_worker_h handle) { return reinterpret_cast<Worker*>(handle); }
Endpoint* endpoint_of(ucp_ep_h handle) { return reinterpret_cast<Endpoint*>(handle); }
ucs_status_ptr_t error_pointer(ucs_status_t status) {
  return reinterpret_cast<ucs_status_ptr_t>(static_cast<intptr_t>(status));
}

ucs_status_ptr_t new_request(Endpoint* endpoint, const ucp_request_param_t* parameters,
                             uint64_t flush_of) {
  ++state().live;
  auto* request = new Request{endpoint, parameters->cb.send, parameters->user_data, flush_of};
  endpoint->from->requests.push_back(request);
  return request;
}

struct Context {
  bool cuda = false;
};
struct Memory {
  void* base = nullptr;
  ucs_memory_type_t kind = UCS_MEMORY_TYPE_HOST;
};
struct Config {};
struct Key {};

unsigned progress(ucp_worker_h handle) {
  Worker* worker = worker_of(handle);
  std::vector<std::pair<Request*, ucs_status_t>> ended;
  std::deque<std::pair<std::string, std::string>> messages;
  std::vector<std::pair<Endpoint*, ucs_status_t>> errors;
  unsigned moved = 0;
  {
    const Lock lock(state().mutex);
    auto& random = state().random;
    if (!state().behaviour.requests_hang) {
      std::shuffle(worker->puts.begin(), worker->puts.end(), random);
      const size_t landing = worker->puts.empty() ? 0 : random() % (worker->puts.size() + 1);
      for (size_t i = 0; i < landing; ++i) {
        const FlyingPut& put = worker->puts[i];
        if (!put.endpoint->broken) std::memcpy(put.to, put.bytes.data(), put.bytes.size());
        put.endpoint->flying.erase(put.number);
        ++moved;
      }
      worker->puts.erase(worker->puts.begin(),
                         worker->puts.begin() + static_cast<ptrdiff_t>(landing));
      std::vector<Request*> left;
      for (Request* request : worker->requests) {
        const auto& flying = request->endpoint->flying;
        const bool landed =
            request->flush_of == 0 || flying.empty() || *flying.begin() > request->flush_of;
        if (request->endpoint->broken) {
          ended.emplace_back(request, UCS_ERR_CONNECTION_RESET);
        } else if (landed) {
          ended.emplace_back(request, UCS_OK);
        } else {
          left.push_back(request);
        }
      }
      worker->requests = left;
    }
    messages.swap(worker->messages);
    errors.swap(worker->errors);
  }
  for (const auto& [request, status] : ended) {
    const ucp_send_nbx_callback_t done = request->done;
    void* const user_data = request->user_data;
    done(request, status, user_data);
  }
  ucp_am_recv_param_t parameters = {};
  for (auto& [header, data] : messages) {
    worker->on_message(worker->argument, header.data(), header.size(),
                       data.empty() ? nullptr : data.data(), data.size(), &parameters);
  }
  for (const auto& [endpoint, status] : errors)
    endpoint->on_error.cb(endpoint->on_error.arg, as<ucp_ep_h>(endpoint), status);
  return moved + static_cast<unsigned>(ended.size() + messages.size() + errors.size());
}

ucs_status_ptr_t send_message(ucp_ep_h handle, unsigned, const void* header, size_t header_bytes,
                              const void* data, size_t bytes, const ucp_request_param_t*) {
  const Lock lock(state().mutex);
  Endpoint* endpoint = endpoint_of(handle);
  if (endpoint->broken) return error_pointer(UCS_ERR_CONNECTION_RESET);
  endpoint->to->messages.emplace_back(
      std::string(static_cast<const char*>(header), header_bytes),
      std::string(data == nullptr ? "" : static_cast<const char*>(data), bytes));
  const uint64_t one = 1;
  (void)!write(endpoint->to->descriptor, &one, sizeof one);
  return nullptr;
}

ucs_status_ptr_t put(ucp_ep_h handle, const void* buffer, size_t bytes, uint64_t to, ucp_rkey_h,
                     const ucp_request_param_t* parameters) {
  const Lock lock(state().mutex);
  Endpoint* endpoint = endpoint_of(handle);
  if (endpoint->broken) return error_pointer(UCS_ERR_CONNECTION_RESET);
  if (state().behaviour.put != UCS_OK) return error_pointer(state().behaviour.put);
  FlyingPut flying{endpoint, ++endpoint->puts, std::string(static_cast<const char*>(buffer), bytes),
                   reinterpret_cast<char*>(to)};
  if (state().behaviour.corrupts) flying.bytes.back() = static_cast<char>(flying.bytes.back() + 1);
  endpoint->flying.insert(flying.number);
  endpoint->from->puts.push_back(std::move(flying));
  return new_request(endpoint, parameters, 0);
}

ucs_status_ptr_t flush(ucp_ep_h handle, const ucp_request_param_t* parameters) {
  const Lock lock(state().mutex);
  Endpoint* endpoint = endpoint_of(handle);
  if (endpoint->broken) return error_pointer(UCS_ERR_CONNECTION_RESET);
  if (endpoint->puts == 0) return nullptr;
  return new_request(endpoint, parameters, endpoint->puts);
}

ucs_status_ptr_t close_endpoint(ucp_ep_h handle, const ucp_request_param_t*) {
  const Lock lock(state().mutex);
  Endpoint* endpoint = endpoint_of(handle);
  endpoint->broken = true;  // what flies is lost, what waits ends with an error
  endpoint->flying.clear();
  std::erase_if(endpoint->from->puts,
                [&](const FlyingPut& flying) { return flying.endpoint == endpoint; });
  std::erase(state().endpoints, endpoint);
  --state().live;
  return nullptr;
}

ucs_status_t create_worker(ucp_context_h, const ucp_worker_params_t*, ucp_worker_h* handle) {
  const Lock lock(state().mutex);
  Worker* worker = state().all_workers.emplace_back(std::make_unique<Worker>()).get();
  worker->descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  state().workers.push_back(worker);
  ++state().live;
  *handle = as<ucp_worker_h>(worker);
  return UCS_OK;
}
void destroy_worker(ucp_worker_h handle) {
  const Lock lock(state().mutex);
  Worker* worker = worker_of(handle);
  ::close(worker->descriptor);
  worker->descriptor = -1;
  // As a queue pair that is gone: what peers still send to it is lost, and they hear of it.
  for (Endpoint* endpoint : state().endpoints) {
    if (endpoint->to != worker || endpoint->broken) continue;
    endpoint->broken = true;
    endpoint->flying.clear();
    endpoint->from->errors.emplace_back(endpoint, UCS_ERR_CONNECTION_RESET);
  }
  std::replace(state().workers.begin(), state().workers.end(), worker,
               static_cast<Worker*>(nullptr));
  --state().live;
}

ucs_status_t create_endpoint(ucp_worker_h handle, const ucp_ep_params_t* parameters,
                             ucp_ep_h* made) {
  const Lock lock(state().mutex);
  Endpoint* endpoint = state().all_endpoints.emplace_back(std::make_unique<Endpoint>()).get();
  endpoint->from = worker_of(handle);
  std::memcpy(&endpoint->to, parameters->address, sizeof endpoint->to);
  endpoint->on_error = parameters->err_handler;
  state().endpoints.push_back(endpoint);
  ++state().live;
  *made = as<ucp_ep_h>(endpoint);
  return UCS_OK;
}

UcxApi make_table() {
  UcxApi api;
  api.library = "fake";
  api.get_version = [](unsigned* major, unsigned* minor, unsigned* release) {
    *major = 1;
    *minor = state().behaviour.minor;
    *release = 0;
  };
  api.get_version_string = []() -> const char* { return "1.x.fake"; };
  api.status_string = [](ucs_status_t status) -> const char* {
    return status == UCS_ERR_CONNECTION_RESET ? "Connection reset by remote peer"
           : status == UCS_ERR_UNSUPPORTED    ? "Operation is not supported"
                                              : "another status";
  };
  api.config_read = [](const char*, const char*, ucp_config_t** config) {
    const Lock lock(state().mutex);
    ++state().live;
    *config = reinterpret_cast<ucp_config_t*>(new Config);
    return UCS_OK;
  };
  api.config_modify = [](ucp_config_t*, const char* key, const char* value) {
    const Lock lock(state().mutex);
    if (state().behaviour.unknown_keys.count(key) != 0) return UCS_ERR_NO_ELEM;
    state().settings[key] = value;
    return UCS_OK;
  };
  api.config_release = [](ucp_config_t* config) {
    const Lock lock(state().mutex);
    --state().live;
    delete reinterpret_cast<Config*>(config);
  };
  api.init_version = [](unsigned, unsigned, const ucp_params_t*, const ucp_config_t*,
                        ucp_context_h* context) {
    const Lock lock(state().mutex);
    if (state().behaviour.start != UCS_OK) return state().behaviour.start;
    ++state().live;
    *context = as<ucp_context_h>(new Context);
    state().made.push_back(*context);
    return UCS_OK;
  };
  api.cleanup = [](ucp_context_h context) {
    const Lock lock(state().mutex);
    --state().live;
    delete reinterpret_cast<Context*>(context);
  };
  api.context_query = [](ucp_context_h, ucp_context_attr_t* attributes) {
    const Lock lock(state().mutex);
    attributes->memory_types = UCS_BIT(UCS_MEMORY_TYPE_HOST) |
                               (state().behaviour.knows_cuda ? UCS_BIT(UCS_MEMORY_TYPE_CUDA) : 0);
    return UCS_OK;
  };
  api.worker_create = create_worker;
  api.worker_destroy = destroy_worker;
  api.worker_query = [](ucp_worker_h worker, ucp_worker_attr_t* attributes) {
    auto* address = new ucp_worker_h(worker);
    attributes->address = reinterpret_cast<ucp_address_t*>(address);
    attributes->address_length = sizeof *address;
    return UCS_OK;
  };
  api.worker_release_address = [](ucp_worker_h, ucp_address_t* address) {
    delete reinterpret_cast<ucp_worker_h*>(address);
  };
  api.worker_progress = progress;
  api.worker_get_efd = [](ucp_worker_h worker, int* descriptor) {
    *descriptor = worker_of(worker)->descriptor;
    return UCS_OK;
  };
  api.worker_arm = [](ucp_worker_h handle) {
    const Lock lock(state().mutex);
    Worker* worker = worker_of(handle);
    uint64_t rings = 0;
    (void)!read(worker->descriptor, &rings, sizeof rings);
    const bool idle =
        state().behaviour.requests_hang || (worker->requests.empty() && worker->puts.empty());
    return idle && worker->messages.empty() && worker->errors.empty() ? UCS_OK : UCS_ERR_BUSY;
  };
  api.worker_set_am_recv_handler = [](ucp_worker_h handle, const ucp_am_handler_param_t* handler) {
    worker_of(handle)->on_message = handler->cb;
    worker_of(handle)->argument = handler->arg;
    return UCS_OK;
  };
  api.ep_create = create_endpoint;
  api.ep_close_nbx = close_endpoint;
  api.ep_flush_nbx = flush;
  api.ep_query = [](ucp_ep_h, ucp_ep_attr_t* attributes) {
    const Lock lock(state().mutex);
    const auto& lanes = state().behaviour.lanes;
    attributes->transports.num_entries = static_cast<unsigned>(lanes.size());
    for (size_t i = 0; i < lanes.size(); ++i) {
      attributes->transports.entries[i] = {lanes[i].first.c_str(), lanes[i].second.c_str()};
    }
    return UCS_OK;
  };
  api.ep_rkey_unpack = [](ucp_ep_h, const void*, ucp_rkey_h* key) {
    const Lock lock(state().mutex);
    ++state().live;
    *key = as<ucp_rkey_h>(new Key);
    state().made.push_back(*key);
    return UCS_OK;
  };
  api.rkey_destroy = [](ucp_rkey_h key) {
    const Lock lock(state().mutex);
    --state().live;
    delete reinterpret_cast<Key*>(key);
  };
  api.mem_map = [](ucp_context_h, const ucp_mem_map_params_t* parameters, ucp_mem_h* memory) {
    const Lock lock(state().mutex);
    if (state().behaviour.map != UCS_OK) return state().behaviour.map;
    ++state().live;
    *memory = as<ucp_mem_h>(new Memory{parameters->address, parameters->memory_type});
    state().made.push_back(*memory);
    return UCS_OK;
  };
  api.mem_unmap = [](ucp_context_h, ucp_mem_h memory) {
    const Lock lock(state().mutex);
    --state().live;
    delete reinterpret_cast<Memory*>(memory);
    return UCS_OK;
  };
  api.mem_query = [](const ucp_mem_h memory, ucp_mem_attr_t* attributes) {
    const Lock lock(state().mutex);
    attributes->mem_type = state().behaviour.takes_cuda_for_host
                               ? UCS_MEMORY_TYPE_HOST
                               : reinterpret_cast<Memory*>(memory)->kind;
    return UCS_OK;
  };
  api.rkey_pack = [](ucp_context_h, ucp_mem_h, void** buffer, size_t* bytes) {
    *buffer = new char[3]{'k', 'e', 'y'};
    *bytes = 3;
    return UCS_OK;
  };
  api.rkey_buffer_release = [](void* buffer) { delete[] static_cast<char*>(buffer); };
  api.put_nbx = put;
  api.am_send_nbx = send_message;
  api.request_free = [](void* request) {
    const Lock lock(state().mutex);
    --state().live;
    delete static_cast<Request*>(request);
  };
  return api;
}

}  // namespace

const UcxApi* fake_ucx(const FakeUcxBehaviour& behaviour) {
  static const UcxApi table = make_table();
  const Lock lock(state().mutex);
  state().behaviour = behaviour;
  state().random.seed(behaviour.seed);
  state().settings.clear();
  state().workers.clear();
  state().endpoints.clear();
  state().live = 0;
  return &table;
}

void fake_ucx_change(const std::function<void(FakeUcxBehaviour&)>& change) {
  const Lock lock(state().mutex);
  change(state().behaviour);
}

std::map<std::string, std::string> fake_ucx_settings() {
  const Lock lock(state().mutex);
  return state().settings;
}

void fake_ucx_break(int worker_index, ucs_status_t status) {
  const Lock lock(state().mutex);
  Worker* worker = state().workers[static_cast<size_t>(worker_index)];
  for (Endpoint* endpoint : state().endpoints) {
    if (endpoint->to != worker && endpoint->from != worker) continue;
    endpoint->broken = true;
    endpoint->flying.clear();
    endpoint->from->errors.emplace_back(endpoint, status);
  }
}

int fake_ucx_live_objects() {
  const Lock lock(state().mutex);
  return state().live;
}

void fake_ucx_inject(const std::string& header, const std::string& data) {
  const Lock lock(state().mutex);
  const uint64_t one = 1;
  for (Worker* worker : state().workers) {
    if (worker == nullptr) continue;
    worker->messages.emplace_back(header, data);
    (void)!write(worker->descriptor, &one, sizeof one);
  }
}

}  // namespace tide
