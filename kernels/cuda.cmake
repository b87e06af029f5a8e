# Compiles the CUDA kernels into images and embeds them in tide_engine (kernels/cuda_images.cc). Without nvcc nothing is
# embedded; the library then says so at run time. Images are shared by all build variants of a checkout.
set(TIDE_CUDA AUTO CACHE STRING "AUTO (kernels where nvcc is found), ON (fail without) or OFF")
if(TIDE_CUDA STREQUAL "OFF")
  return()
endif()
find_program(TIDE_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin DOC "CUDA compiler; empty: no kernels")
if(NOT TIDE_NVCC)
  if(TIDE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TIDE_CUDA=ON, but nvcc was not found; set TIDE_NVCC")
  endif()
  message(STATUS "tide: no nvcc, CUDA kernels are left out")
  return()
endif()
set(TIDE_CUDA_ARCHITECTURES "80;90;100" CACHE STRING "GPUs that kernels are compiled for; the last one as PTX, too")

set(cuda_flags -std=c++20 -fmad=false -O3)
foreach(architecture ${TIDE_CUDA_ARCHITECTURES})
  list(APPEND cuda_flags -gencode arch=compute_${architecture},code=sm_${architecture})
  set(newest ${architecture})
endforeach()
list(APPEND cuda_flags -gencode arch=compute_${newest},code=compute_${newest})
string(JOIN " " cuda_flags_line ${cuda_flags})
string(JOIN "-" architecture_names ${TIDE_CUDA_ARCHITECTURES})
set(image_folder ${CMAKE_SOURCE_DIR}/build/cuda-images-${architecture_names})
file(MAKE_DIRECTORY ${image_folder})

file(GLOB cuda_headers CONFIGURE_DEPENDS kernels/cuda_*.cuh kernels/cuda_params.h)
set(cuda_images)
foreach(name accumulate cast combine pack)
  set(image ${image_folder}/${name}.fatbin)
  add_custom_command(
    OUTPUT ${image}
    COMMAND ${CMAKE_COMMAND} -DNVCC=${TIDE_NVCC} "-DFLAGS=${cuda_flags_line}" -DROOT=${CMAKE_SOURCE_DIR} -DNAME=${name}
            -DFOLDER=${image_folder} -P ${CMAKE_SOURCE_DIR}/kernels/compile_image.cmake
    DEPENDS ${CMAKE_SOURCE_DIR}/kernels/${name}.cu ${cuda_headers} ${CMAKE_SOURCE_DIR}/kernels/compile_image.cmake
    COMMENT "CUDA kernels: ${name}"
    VERBATIM)
  list(APPEND cuda_images ${image})
endforeach()
set_source_files_properties(kernels/cuda_images.cc PROPERTIES
  COMPILE_DEFINITIONS "TIDE_CUDA_IMAGE_FOLDER=\"${image_folder}\""
  OBJECT_DEPENDS "${cuda_images}")
