#include "transports/cuda/kernel_library.h"

#include <array>

namespace tide::cuda {
namespace {

struct Wanted {
  std::string image;
  std::string kernel;
};

std::vector<Wanted> wanted_kernels() {
  constexpr std::array kSummed = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  constexpr std::array kCast = {DType::kBFloat16, DType::kFloat16, DType::kFloat32,
                                DType::kFloat64};
  std::vector<Wanted> all;
  for (const DType slice : kSummed) all.push_back({"accumulate", accumulate_kernel(slice)});
  for (const DType from : kCast) {
    for (const DType to : kCast) {
      if (from != to) all.push_back({"cast", cast_kernel(from, to)});
    }
  }
  all.push_back({"pack", pack_kernel()});
  all.push_back({"combine", multicast_kernel()});
  return all;
}

}  // namespace

tide::Result<std::unique_ptr<KernelLibrary>> KernelLibrary::load(
    const DriverApi& api, const std::vector<KernelImage>& images) {
  std::unique_ptr<KernelLibrary> library(new KernelLibrary(api));
  std::unordered_map<std::string, Module> modules;
  for (const KernelImage& image : images) {
    Module module = nullptr;
    const Code code = api.module_load(&module, image.data);
    if (code == kNoBinaryForGpu || code == kInvalidImage) {
      return Status(ErrorKind::kUnsupported,
                    std::string("the CUDA kernels in this build of tide ('") + image.name +
                        "') have no code for this GPU");
    }
    TIDE_RETURN_IF_ERROR(
        check(api, code, "cuModuleLoadData", std::string("loading kernels '") + image.name + "'"));
    library->modules_.push_back(module);
    modules[image.name] = module;
  }
  for (const Wanted& wanted : wanted_kernels()) {
    const std::string what = "loading kernel '" + wanted.kernel + "'";
    const auto module = modules.find(wanted.image);
    if (module == modules.end())
      return Status(ErrorKind::kInternal, what + ": no image '" + wanted.image + "'");
    Function function = nullptr;
    TIDE_RETURN_IF_ERROR(
        check(api, api.module_function(&function, module->second, wanted.kernel.c_str()),
              "cuModuleGetFunction", what));
    TIDE_RETURN_IF_ERROR(check(api, api.function_load(function), "cuFuncLoad", what));
    library->entries_[wanted.kernel] = function;
  }
  return library;
}

KernelLibrary::~KernelLibrary() {
  for (Module module : modules_) (void)api_.module_unload(module);
}

Status KernelLibrary::launch(Stream stream, const std::string& kernel, ListBuilder& list,
                             unsigned most_ctas) const {
  if (list.empty()) return Status::ok();
  const auto entry = entries_.find(kernel);
  if (entry == entries_.end()) return {ErrorKind::kInternal, "no kernel named '" + kernel + "'"};
  void* parameters[] = {list.parameters()};
  return check(api_,
               api_.launch(entry->second, list.ctas(most_ctas), 1, 1, kThreads, 1, 1, 0, stream,
                           parameters, nullptr),
               "cuLaunchKernel", "launching '" + kernel + "'");
}

}  // namespace tide::cuda
