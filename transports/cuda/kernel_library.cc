#include "transports/cuda/kernel_library.h"

#include <array>

namespace tide::cuda {
namespace {

struct Wanted {
  std::string image;
  std::string kernel;
  unsigned shared_bytes = 0;
};

std::vector<Wanted> wanted_kernels() {
  constexpr std::array kSummed = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  constexpr std::array kCast = {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64};
  std::vector<Wanted> all;
  for (const bool is_short : {true, false}) {
    for (const DType slice : kSummed) {
      all.push_back({"accumulate", accumulate_kernel(slice, is_short), kSumSharedBytes});
    }
    for (const DType from : kCast) {
      for (const DType to : kCast) {
        if (from != to) all.push_back({"cast", cast_kernel(from, to, is_short)});
      }
    }
    all.push_back({"pack", pack_kernel(is_short)});
    all.push_back({"combine", multicast_kernel(is_short)});
  }
  return all;
}

}  // namespace

tide::Result<std::unique_ptr<KernelLibrary>> KernelLibrary::load(const DriverApi& api, Device device,
                                                                 const std::vector<KernelImage>& images) {
  int shared_bytes = 0;
  TIDE_RETURN_IF_ERROR(check(api, api.device_attribute(&shared_bytes, kAttributeSharedBytesOptIn, device),
                             "cuDeviceGetAttribute", "asking for shared memory"));
  if (shared_bytes < kSumSharedBytes) {
    return Status(ErrorKind::kUnsupported, "the GPU gives a CTA " + std::to_string(shared_bytes) +
                                               " bytes of shared memory; tide's sums need " +
                                               std::to_string(kSumSharedBytes));
  }
  std::unique_ptr<KernelLibrary> library(new KernelLibrary(api));
  std::unordered_map<std::string, Module> modules;
  for (const KernelImage& image : images) {
    Module module = nullptr;
    const Code code = api.module_load(&module, image.data);
    if (code == kNoBinaryForGpu || code == kInvalidImage) {
      return Status(ErrorKind::kUnsupported, std::string("the CUDA kernels in this build of tide ('") + image.name +
                                                 "') have no code for this GPU");
    }
    TIDE_RETURN_IF_ERROR(check(api, code, "cuModuleLoadData", std::string("loading kernels '") + image.name + "'"));
    library->modules_.push_back(module);
    modules[image.name] = module;
  }
  for (const Wanted& wanted : wanted_kernels()) {
    const std::string what = "loading kernel '" + wanted.kernel + "'";
    const auto module = modules.find(wanted.image);
    if (module == modules.end()) return Status(ErrorKind::kInternal, what + ": no image '" + wanted.image + "'");
    Entry entry;
    entry.shared_bytes = wanted.shared_bytes;
    TIDE_RETURN_IF_ERROR(check(api, api.module_function(&entry.function, module->second, wanted.kernel.c_str()),
                               "cuModuleGetFunction", what));
    TIDE_RETURN_IF_ERROR(check(api, api.function_load(entry.function), "cuFuncLoad", what));
    if (entry.shared_bytes > 0) {
      TIDE_RETURN_IF_ERROR(check(api, api.function_set_attribute(entry.function, kFunctionDynamicSharedBytes,
                                                                 static_cast<int>(entry.shared_bytes)),
                                 "cuFuncSetAttribute", what));
    }
    library->entries_[wanted.kernel] = entry;
  }
  return library;
}

KernelLibrary::~KernelLibrary() {
  for (Module module : modules_) (void)api_.module_unload(module);
}

Status KernelLibrary::launch(Stream stream, const std::string& kernel, ListBuilder& list, unsigned most_ctas) const {
  if (list.empty()) return Status::ok();
  const auto entry = entries_.find(kernel);
  if (entry == entries_.end()) return {ErrorKind::kInternal, "no kernel named '" + kernel + "'"};
  void* parameters[] = {list.parameters()};
  return check(api_, api_.launch(entry->second.function, list.ctas(most_ctas), 1, 1, kThreads, 1, 1,
                                 entry->second.shared_bytes, stream, parameters, nullptr),
               "cuLaunchKernel", "launching '" + kernel + "'");
}

}  // namespace tide::cuda
