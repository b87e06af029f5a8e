// The compiled CUDA kernels inside this binary: one image per .cu file (machine code for sm_80,
// sm_90 and sm_100, and PTX for newer GPUs), as the driver's module loader takes it. Builds without
// nvcc have none, and say why.
#pragma once

#include <vector>

#include "backend/base/status.h"

namespace tide::cuda {

struct KernelImage {
  const char* name;  // "accumulate"
  const void* data;  // static; begins with its own length
};

// kUnsupported when the build had no nvcc.
Result<std::vector<KernelImage>> kernel_images();

}  // namespace tide::cuda
