#include "tests/unit/cuda_driver_fake.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "kernels/accumulate.h"
#include "kernels/cast.h"
#include "kernels/copy.h"
#include "kernels/cuda_lists.h"
#include "tests/unit/cuda_multicast_fake.h"

namespace tide::cuda {
namespace {

constexpr size_t kGranularity = size_t{1} << 16;
constexpr Code kInvalidContext = 201;
constexpr size_t kMostPieces = 128;

char* host(DevicePointer pointer) { return reinterpret_cast<char*>(pointer); }
bool reached(DevicePointer word, uint32_t value) {
  return static_cast<int32_t>(std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(word)).load() -
                              value) >= 0;
}
void store(DevicePointer word, uint32_t value) {
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(word)).store(value);
}

thread_local std::map<int, Context> current_contexts;  // by process

class FakeStream {
 public:
  explicit FakeStream(const std::atomic<bool>& ending)
      : ending_(ending), thread_([this] { run(); }) {}
  ~FakeStream() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  // A task returns false while it must be tried again.
  void push(std::function<bool()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty();
  }
  void synchronize() {
    while (!idle() && !ending_) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<bool()> task = tasks_.front();
      lock.unlock();
      bool done = task();
      while (!done && !ending_) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        done = task();
      }
      lock.lock();
      tasks_.pop_front();
    }
  }
  const std::atomic<bool>& ending_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<bool()>> tasks_;
  bool closing_ = false;
  std::thread thread_;
};

// What a list's kernel does, by the processor's kernels.
void run_list(const std::string& name, const List& list, const FakeMulticast& multicast) {
  const uint64_t* block = list.words;
  const bool poisoned =
      list.head.poison != nullptr &&
      std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(list.head.poison)).load() != 0;
  for (uint32_t b = 0; b < list.head.blocks; ++b) {
    void* to = reinterpret_cast<void*>(block[kTo]);
    const auto numel = static_cast<int64_t>(block[kNumel]);
    const uint32_t output = list.head.flags & kOutputMask;
    const DType output_dtype = output == kOutputFp32   ? DType::kFloat32
                               : output == kOutputBf16 ? DType::kBFloat16
                                                       : DType::kFloat16;
    const float nan = std::bit_cast<float>(0x7fc00000u);
    AccumulateOptions options;
    options.scale = poisoned ? nan : list.head.scale;
    options.add_to_output = (list.head.flags & kAddToOutput) != 0;
    if (name == multicast_kernel()) {  // the members in some order: that of their devices
      AccumulateBlock sum;
      for (const char* member : multicast.members(block[kFrom])) sum.slices.push_back(member);
      sum.output = to;
      sum.numel = numel;
      sum.output_dtype = output_dtype;
      (void)accumulate_block(sum, options);
      block += kCastWords;
    } else if (name.starts_with("accumulate_")) {
      AccumulateBlock sum;
      sum.slice_dtype = name.ends_with("bf16")   ? DType::kBFloat16
                        : name.ends_with("fp16") ? DType::kFloat16
                                                 : DType::kFloat32;
      sum.output_dtype = output_dtype;
      const uint64_t count = block[kSlices] & 0xffffffffu;
      for (uint64_t s = 0; s < count; ++s)
        sum.slices.push_back(reinterpret_cast<const void*>(block[kAccumulateWords + s]));
      sum.output = to;
      sum.numel = count == 0 ? 0 : numel;
      sum.pad_numel = count == 0 ? numel : 0;
      if (count == 0) {
        static const float zero = 0;
        sum.slices.push_back(&zero);
      }
      (void)accumulate_block(sum, options);
      block += kAccumulateWords + count;
    } else if (name.starts_with("cast_")) {
      const auto type = [&](const std::string& part) {
        return part == "bf16"   ? DType::kBFloat16
               : part == "fp16" ? DType::kFloat16
               : part == "fp32" ? DType::kFloat32
                                : DType::kFloat64;
      };
      (void)cast_block({to, reinterpret_cast<const void*>(block[kFrom]), numel,
                        type(name.substr(10, 4)), type(name.substr(5, 4))});
      block += kCastWords;
    } else {
      copy_block({to, reinterpret_cast<const void*>(block[kFrom]),
                  static_cast<int64_t>(block[kRows] & ~kFits16), numel,
                  static_cast<int64_t>(block[kToPitch]), static_cast<int64_t>(block[kFromPitch])});
      block += kPackWords;
    }
  }
}

}  // namespace

class FakeDriver::State {
 public:
  std::mutex mutex;
  std::atomic<bool> ending{false};
  std::map<AllocationHandle, std::pair<int, bool>> allocations;  // descriptor, imported
  std::map<DevicePointer, std::pair<size_t, int>> reserved;      // bytes, process
  std::map<DevicePointer, std::pair<size_t, bool>> mappings;     // bytes, imported
  std::map<Stream, std::unique_ptr<FakeStream>> streams;
  std::map<Stream, int> stream_process;
  std::vector<std::unique_ptr<FakeStream>>
      graveyard;  // destroyed with work left: they end with the driver
  std::map<Event, std::shared_ptr<std::atomic<bool>>> events;
  std::set<void*> host_memory;
  std::vector<std::unique_ptr<std::string>> kernels;
  AllocationHandle next_handle = 1;
  uintptr_t next_event = 1;
  std::string misuses;
  FakeMulticast multicast{[this](const std::string& what) { misuse(what); }};

  // What a store to `to` reaches: the memory there, or all members' of a multicast object.
  std::vector<char*> targets(DevicePointer to) const {
    std::vector<char*> members = multicast.members(to);
    return members.empty() ? std::vector<char*>{host(to)} : members;
  }

  void misuse(const std::string& what) {
    std::lock_guard lock(mutex);
    misuses += what + "\n";
  }
  FakeStream* stream(Stream handle) {
    std::lock_guard lock(mutex);
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second.get();
  }
  bool is_imported(DevicePointer address) {
    std::lock_guard lock(mutex);
    auto after = mappings.upper_bound(address);
    if (after == mappings.begin()) return false;
    --after;
    return address < after->first + after->second.first && after->second.second;
  }
};

FakeDriver::FakeDriver() : state_(std::make_shared<State>()) {}

FakeDriver::~FakeDriver() {
  state_->ending = true;
  state_->streams.clear();
  state_->graveyard.clear();
}

std::vector<KernelImage> FakeDriver::images() {
  static const char image[1] = {};
  return {{"accumulate", image}, {"cast", image}, {"combine", image}, {"pack", image}};
}

std::string FakeDriver::misuses() const {
  std::lock_guard lock(state_->mutex);
  return state_->misuses;
}

int FakeDriver::live_objects() const {
  std::lock_guard lock(state_->mutex);
  return static_cast<int>(state_->allocations.size() + state_->reserved.size() +
                          state_->mappings.size() + state_->streams.size() +
                          state_->host_memory.size()) +
         state_->multicast.live();
}

int FakeDriver::multicast_creates() const { return state_->multicast.creates(); }

DriverApi FakeDriver::api(int process) {
  DriverApi api;
  State* const state = state_.get();
  api.version = 13000;
  const auto enqueue = [this, state, process](Stream handle, const char* call,
                                              std::function<bool()> task) -> Code {
    (void)this;
    if (current_contexts[process] == nullptr) {
      state->misuse(std::string(call) + " without a current context");
      return kInvalidContext;
    }
    FakeStream* stream = handle == nullptr ? nullptr : state->stream(handle);
    if (stream == nullptr) {
      state->misuse(std::string(call) + " on the legacy stream or a dead one");
      return kInvalidValue;
    }
    stream->push(std::move(task));
    return kSuccess;
  };

  api.error_name = [](Code, const char** name) {
    *name = "FAKE_ERROR";
    return kSuccess;
  };
  api.device_count = [this](int* count) {
    *count = devices;
    return kSuccess;
  };
  api.device = [this](Device* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < devices ? kSuccess : kInvalidDevice;
  };
  api.device_name = [](char* name, int bytes, Device) {
    std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
    return kSuccess;
  };
  api.device_uuid = [](Uuid* uuid, Device device) {
    *uuid = {};
    uuid->bytes[0] = static_cast<unsigned char>(device + 1);
    return kSuccess;
  };
  api.device_attribute = [this](int* value, int attribute, Device) {
    *value = attribute != kAttributeMulticast || multicast ? 1 : 0;
    return kSuccess;
  };
  api.can_access_peer = [this](int* can, Device, Device) {
    *can = peer_access ? 1 : 0;
    return kSuccess;
  };
  api.primary_context_retain = [](Context* context, Device device) {
    *context = reinterpret_cast<Context>(static_cast<uintptr_t>(device + 1));
    return kSuccess;
  };
  api.primary_context_release = [](Device) { return kSuccess; };
  api.context_set_current = [process](Context context) {
    current_contexts[process] = context;
    return kSuccess;
  };
  api.context_get_current = [process](Context* context) {
    *context = current_contexts[process];
    return kSuccess;
  };

  api.context_synchronize = [this, state, process] {
    ++synchronisations_;
    std::vector<Stream> own;
    {
      std::lock_guard lock(state->mutex);
      for (const auto& [stream, owner] : state->stream_process) {
        if (owner == process) own.push_back(stream);
      }
    }
    for (Stream stream : own) {
      while (!state->ending) {
        {
          std::lock_guard lock(state->mutex);
          const auto found = state->streams.find(stream);
          if (found == state->streams.end() || found->second->idle()) break;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return kSuccess;
  };

  api.stream_priority_range = [](int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return kSuccess;
  };
  api.stream_create = [state, process](Stream* stream, unsigned int, int) {
    auto made = std::make_unique<FakeStream>(state->ending);
    *stream = reinterpret_cast<Stream>(made.get());
    std::lock_guard lock(state->mutex);
    state->streams[*stream] = std::move(made);
    state->stream_process[*stream] = process;
    return kSuccess;
  };
  api.stream_destroy = [state](Stream stream) {
    std::unique_ptr<FakeStream> gone;
    std::lock_guard lock(state->mutex);
    const auto found = state->streams.find(stream);
    if (found == state->streams.end()) return kInvalidHandle;
    gone = std::move(found->second);
    state->streams.erase(found);
    state->stream_process.erase(stream);
    if (!gone->idle()) state->graveyard.push_back(std::move(gone));
    return kSuccess;
  };
  api.stream_query = [state](Stream stream) {
    return state->stream(stream)->idle() ? kSuccess : kNotReady;
  };
  api.stream_synchronize = [this, state](Stream stream) {
    ++synchronisations_;
    state->stream(stream)->synchronize();
    return kSuccess;
  };
  api.stream_is_capturing = [this](Stream, int* status) {
    *status = capturing ? kCaptureNone + 1 : kCaptureNone;
    return kSuccess;
  };
  api.event_create = [state](Event* event, unsigned int) {
    std::lock_guard lock(state->mutex);
    *event = reinterpret_cast<Event>(state->next_event++);
    state->events[*event] = std::make_shared<std::atomic<bool>>(true);
    return kSuccess;
  };
  api.event_destroy = [state](Event event) {
    std::lock_guard lock(state->mutex);
    state->events.erase(event);
    return kSuccess;
  };
  api.event_record = [state, enqueue](Event event, Stream stream) {
    auto flag = std::make_shared<std::atomic<bool>>(false);
    {
      std::lock_guard lock(state->mutex);
      state->events[event] = flag;
    }
    if (stream == nullptr) {  // events may be recorded there: nothing ever runs on it
      *flag = true;
      return kSuccess;
    }
    return enqueue(stream, "event_record", [flag] {
      *flag = true;
      return true;
    });
  };
  api.event_query = [state](Event event) {
    std::lock_guard lock(state->mutex);
    return *state->events[event] ? kSuccess : kNotReady;
  };
  api.stream_wait_event = [state, enqueue](Stream stream, Event event, unsigned int) {
    std::shared_ptr<std::atomic<bool>> flag;
    {
      std::lock_guard lock(state->mutex);
      flag = state->events[event];
    }
    return enqueue(stream, "stream_wait_event", [flag] { return flag->load(); });
  };

  api.memory_granularity = [](size_t* granularity, const AllocationProperties*, int) {
    *granularity = kGranularity;
    return kSuccess;
  };
  api.memory_create = [state](AllocationHandle* handle, size_t bytes, const AllocationProperties*,
                              unsigned long long) {
    if (bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
    const int fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
    std::lock_guard lock(state->mutex);
    *handle = state->next_handle++;
    state->allocations[*handle] = {fd, false};
    return kSuccess;
  };
  api.memory_release = [state](AllocationHandle handle) {
    if (state->multicast.owns(handle)) return state->multicast.release(handle);
    if (state->multicast.is_bound(handle)) state->misuse("memory released while it is bound");
    std::lock_guard lock(state->mutex);
    const auto found = state->allocations.find(handle);
    if (found == state->allocations.end()) return kInvalidHandle;
    ::close(found->second.first);
    state->allocations.erase(found);
    return kSuccess;
  };
  api.memory_export = [state](void* descriptor, AllocationHandle handle, int, unsigned long long) {
    const int object = state->multicast.share(handle);
    std::lock_guard lock(state->mutex);
    const int fd = object >= 0 ? object : ::dup(state->allocations.at(handle).first);
    std::memcpy(descriptor, &fd, sizeof(fd));
    return fd >= 0 ? kSuccess : kInvalidValue;
  };
  api.memory_import = [state](AllocationHandle* handle, void* descriptor, int) {
    const int given = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
    const Code taken = state->multicast.take(handle, given);
    if (taken != kNotFound) return taken;
    const int fd = ::dup(given);
    if (fd < 0) return kInvalidValue;
    std::lock_guard lock(state->mutex);
    *handle = state->next_handle++;
    state->allocations[*handle] = {fd, true};
    return kSuccess;
  };
  api.address_reserve = [state, process](DevicePointer* base, size_t bytes, size_t, DevicePointer,
                                         unsigned long long) {
    // Filled with something else than zeros: what the fabric must clear is then seen.
    void* at = ::mmap(nullptr, bytes + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return kOutOfMemory;
    *base = (reinterpret_cast<DevicePointer>(at) + kGranularity - 1) / kGranularity * kGranularity;
    std::lock_guard lock(state->mutex);
    state->reserved[*base] = {bytes, process};
    return kSuccess;
  };
  api.address_free = [state](DevicePointer base, size_t bytes) {
    std::lock_guard lock(state->mutex);
    const auto found = state->reserved.find(base);
    if (found == state->reserved.end() || found->second.first != bytes) return kInvalidValue;
    state->reserved.erase(found);
    return kSuccess;  // the addresses stay reserved: a late use is a fault, not another's memory
  };
  api.memory_map = [state](DevicePointer at, size_t bytes, size_t offset, AllocationHandle handle,
                           unsigned long long) {
    if (state->multicast.owns(handle)) return state->multicast.map(at, bytes, offset, handle);
    std::lock_guard lock(state->mutex);
    const auto found = state->allocations.find(handle);
    if (offset != 0 || found == state->allocations.end()) return kInvalidValue;
    void* mapped = ::mmap(host(at), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                          found->second.first, 0);
    if (mapped == MAP_FAILED) return kOutOfMemory;
    state->mappings[at] = {bytes, found->second.second};
    return kSuccess;
  };
  api.memory_unmap = [state](DevicePointer at, size_t bytes) {
    if (state->multicast.unmap(at, bytes)) return kSuccess;
    std::lock_guard lock(state->mutex);
    const auto found = state->mappings.find(at);
    if (found == state->mappings.end() || found->second.first != bytes) return kInvalidValue;
    state->mappings.erase(found);
    ::mmap(host(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return kSuccess;
  };
  api.memory_set_access = [](DevicePointer, size_t, const AccessDescriptor*, size_t) {
    return kSuccess;
  };
  api.host_allocate = [state](void** memory, size_t bytes, unsigned int) {
    *memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard lock(state->mutex);
    state->host_memory.insert(*memory);
    return kSuccess;
  };
  api.host_free = [state](void* memory) {
    std::lock_guard lock(state->mutex);
    if (state->host_memory.erase(memory) == 0) return kInvalidValue;
    std::free(memory);
    return kSuccess;
  };
  api.host_device_pointer = [](DevicePointer* pointer, void* memory, unsigned int) {
    *pointer = reinterpret_cast<DevicePointer>(memory);
    return kSuccess;
  };

  const auto put = [state](DevicePointer to, const char* from, size_t bytes) {
    for (char* target : state->targets(to)) {
      if (target != from) std::memcpy(target, from, bytes);
    }
  };
  api.copy = [this, put, enqueue](DevicePointer to, DevicePointer from, size_t bytes,
                                  Stream stream) {
    ++copies_;
    return enqueue(stream, "copy", [put, to, from, bytes] {
      if (bytes == sizeof(uint32_t) && to % 4 == 0) {  // a signal: whole at once
        store(to, std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(from)).load());
      } else {
        put(to, host(from), bytes);
      }
      return true;
    });
  };
  api.copy_2d = [this, put, enqueue](const Copy2D* copy, Stream stream) {
    ++copies_;
    return enqueue(stream, "copy_2d", [put, c = *copy] {
      for (size_t row = 0; row < c.height; ++row)
        put(c.target + row * c.target_pitch, host(c.source) + row * c.source_pitch, c.width_bytes);
      return true;
    });
  };
  api.copy_batch = [this, state, put, enqueue](DevicePointer* to, DevicePointer* from,
                                               size_t* bytes, size_t count,
                                               CopyAttributes* attributes, size_t* first,
                                               size_t kinds, Stream stream) -> Code {
    ++batches_;
    if (count > kMostPieces) state->misuse("a batch of " + std::to_string(count) + " pieces");
    if (kinds != 1 || first[0] != 0 || attributes[0].source_order != 1) return kInvalidValue;
    // No order inside a batch: last piece first.
    return enqueue(stream, "copy_batch",
                   [put, to = std::vector<DevicePointer>(to, to + count),
                    from = std::vector<DevicePointer>(from, from + count),
                    bytes = std::vector<size_t>(bytes, bytes + count)] {
                     for (size_t i = to.size(); i-- > 0;) put(to[i], host(from[i]), bytes[i]);
                     return true;
                   });
  };
  api.set_words = [this, enqueue](DevicePointer to, unsigned int value, size_t count,
                                  Stream stream) {
    if (count == 1) ++one_word_memsets_;
    return enqueue(stream, "set_words", [to, value, count] {
      for (size_t i = 0; i < count; ++i) store(to + 4 * i, value);
      return true;
    });
  };
  api.set_bytes = [enqueue](DevicePointer to, unsigned char value, size_t bytes, Stream stream) {
    return enqueue(stream, "set_bytes", [to, value, bytes] {
      std::memset(host(to), value, bytes);
      return true;
    });
  };
  api.wait_value = [enqueue](Stream stream, DevicePointer word, uint32_t value, unsigned int) {
    return enqueue(stream, "wait_value", [word, value] { return reached(word, value); });
  };
  const auto write = [state, enqueue](Stream stream, DevicePointer word, uint32_t value) -> Code {
    if (state->is_imported(word)) {
      state->misuse("a stream write to another rank's memory");
      return kInvalidValue;
    }
    return enqueue(stream, "write_value", [word, value] {
      store(word, value);
      return true;
    });
  };
  api.write_value = [write](Stream stream, DevicePointer word, uint32_t value, unsigned int) {
    return write(stream, word, value);
  };
  api.memory_ops = [write, enqueue](Stream stream, unsigned int count, MemoryOp* operations,
                                    unsigned int) -> Code {
    for (unsigned int i = 0; i < count; ++i) {
      const MemoryOp op = operations[i];
      const auto value = static_cast<uint32_t>(op.value);
      const Code code =
          op.operation == kMemoryOpWrite32
              ? write(stream, op.address, value)
              : enqueue(stream, "memory_ops", [op, value] { return reached(op.address, value); });
      if (code != kSuccess) return code;
    }
    return kSuccess;
  };

  api.module_load = [](Module* module, const void* image) {
    *module = reinterpret_cast<Module>(const_cast<void*>(image));
    return kSuccess;
  };
  api.module_unload = [](Module) { return kSuccess; };
  api.module_function = [state](Function* function, Module, const char* name) {
    std::lock_guard lock(state->mutex);
    state->kernels.push_back(std::make_unique<std::string>(name));
    *function = reinterpret_cast<Function>(state->kernels.back().get());
    return kSuccess;
  };
  api.function_load = [](Function) { return kSuccess; };
  api.function_set_attribute = [](Function, int, int) { return kSuccess; };
  api.launch = [this, state, enqueue](Function function, unsigned x, unsigned, unsigned, unsigned,
                                      unsigned, unsigned, unsigned, Stream stream,
                                      void** parameters, void**) {
    ++launches_;
    if (x > kCtas) state->misuse("a launch of " + std::to_string(x) + " CTAs");
    auto list = std::make_shared<List>(*static_cast<const List*>(parameters[0]));
    return enqueue(stream, "launch",
                   [state, list, name = *reinterpret_cast<std::string*>(function)] {
                     run_list(name, *list, state->multicast);
                     return true;
                   });
  };
  api.multicast = state->multicast.entries([state](AllocationHandle memory) {
    std::lock_guard lock(state->mutex);
    const auto found = state->allocations.find(memory);
    return found == state->allocations.end() ? -1 : found->second.first;
  });
  return api;
}

}  // namespace tide::cuda
