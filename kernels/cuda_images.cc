#include "kernels/cuda_images.h"

// TIDE_CUDA_IMAGE_FOLDER is set by kernels/cuda.cmake where nvcc was found: the folder with
// <name>.fatbin.
#ifdef TIDE_CUDA_IMAGE_FOLDER
#define TIDE_IMAGE(name)                           \
  asm(".pushsection .rodata\n"                     \
      ".balign 16\n"                               \
      "tide_cuda_image_" name                      \
      ":\n"                                        \
      ".incbin \"" TIDE_CUDA_IMAGE_FOLDER "/" name \
      ".fatbin\"\n"                                \
      ".balign 16\n"                               \
      ".popsection\n")
TIDE_IMAGE("accumulate");
TIDE_IMAGE("cast");
TIDE_IMAGE("combine");
TIDE_IMAGE("pack");
extern "C" {
extern const char tide_cuda_image_accumulate[] __attribute__((visibility("hidden")));
extern const char tide_cuda_image_cast[] __attribute__((visibility("hidden")));
extern const char tide_cuda_image_combine[] __attribute__((visibility("hidden")));
extern const char tide_cuda_image_pack[] __attribute__((visibility("hidden")));
}
#endif

namespace tide::cuda {

Result<std::vector<KernelImage>> kernel_images() {
#ifdef TIDE_CUDA_IMAGE_FOLDER
  return std::vector<KernelImage>{{"accumulate", tide_cuda_image_accumulate},
                                  {"cast", tide_cuda_image_cast},
                                  {"combine", tide_cuda_image_combine},
                                  {"pack", tide_cuda_image_pack}};
#else
  return Status(ErrorKind::kUnsupported,
                "this build of tide has no CUDA kernels: nvcc was not found when it was built "
                "(install the CUDA "
                "toolkit 13 or set TIDE_NVCC, and build again)");
#endif
}

}  // namespace tide::cuda
