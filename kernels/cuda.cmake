# Compiles the CUDA kernels into images and embeds them in tide_engine (kernels/cuda_images.cc). Without nvcc nothing is
# embedded; the library then says so at run time. Images are shared by all build variants of a checkout.
find_program(TIDE_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin DOC "CUDA compiler; empty: no kernels")
if(NOT TIDE_NVCC)
  message(STATUS "tide: no nvcc, CUDA kernels are left out")
  return()
endif()
set(TIDE_CUDA_ARCHITECTURES "80;90;100" CACHE STRING "GPUs that kernels are compiled for; the last one as PTX, too")

file(GLOB cuda_headers CONFIGURE_DEPENDS kernels/cuda_*.cuh kernels/cuda_params.h)
set(cuda_flags -std=c++20 -fmad=false -O3 --threads 2)
foreach(architecture ${TIDE_CUDA_ARCHITECTURES})
  list(APPEND cuda_flags -gencode "arch=compute_${architecture},code=sm_${architecture}")
endforeach()
list(APPEND cuda_flags -gencode "arch=compute_${architecture},code=compute_${architecture}")
string(JOIN "-" architecture_names ${TIDE_CUDA_ARCHITECTURES})
set(image_folder ${CMAKE_SOURCE_DIR}/build/cuda-images-${architecture_names})
file(MAKE_DIRECTORY ${image_folder})

set(cuda_images)
foreach(name accumulate cast combine pack)
  set(image ${image_folder}/${name}.fatbin)
  # Under its own name first: two builds may compile at the same time.
  add_custom_command(
    OUTPUT ${image}
    COMMAND ${TIDE_NVCC} ${cuda_flags} -I${CMAKE_SOURCE_DIR} -fatbin ${CMAKE_SOURCE_DIR}/kernels/${name}.cu -o
            ${CMAKE_BINARY_DIR}/${name}.fatbin
    COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_BINARY_DIR}/${name}.fatbin ${image}.part
    COMMAND ${CMAKE_COMMAND} -E rename ${image}.part ${image}
    DEPENDS ${CMAKE_SOURCE_DIR}/kernels/${name}.cu ${cuda_headers}
    COMMENT "CUDA kernels: ${name}"
    VERBATIM)
  list(APPEND cuda_images ${image})
endforeach()
set_source_files_properties(kernels/cuda_images.cc PROPERTIES
  COMPILE_DEFINITIONS "TIDE_CUDA_IMAGE_FOLDER=\"${image_folder}\""
  OBJECT_DEPENDS "${cuda_images}")
