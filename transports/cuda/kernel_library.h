// The kernels of kernels/*.cu, loaded into one context: all of them at once, so that no launch ever
// loads code (lazy loading may synchronise the device, and would then wait behind a blocked
// stream).
//
// Made and destroyed with the context current; launches from any thread that has it current.
// Unloading needs the context alive; after cuDeinit the driver's refusal is ignored.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/cuda_images.h"
#include "kernels/cuda_lists.h"
#include "transports/cuda/driver_api.h"

namespace tide::cuda {

class KernelLibrary {
 public:
  // Images without code for this GPU are kUnsupported with that reason.
  static tide::Result<std::unique_ptr<KernelLibrary>> load(const DriverApi& api,
                                                           const std::vector<KernelImage>& images);
  ~KernelLibrary();
  KernelLibrary(const KernelLibrary&) = delete;
  KernelLibrary& operator=(const KernelLibrary&) = delete;

  // Enqueues `kernel` over the list with at most `most_ctas` CTAs; nothing for an empty list.
  Status launch(Stream stream, const std::string& kernel, ListBuilder& list,
                unsigned most_ctas = kCtas) const;

 private:
  explicit KernelLibrary(const DriverApi& api) : api_(api) {}

  const DriverApi api_;
  std::vector<Module> modules_;
  std::unordered_map<std::string, Function> entries_;
};

}  // namespace tide::cuda
