# The programs that need a GPU; without one they skip. ci/device builds them alone and runs them.
file(GLOB TIDE_GPU_TESTS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/gpu/*_test.cc)
foreach(test_source ${TIDE_GPU_TESTS})
  get_filename_component(test_name ${test_source} NAME_WE)
  set(test_name gpu_${test_name})
  add_executable(${test_name} ${test_source})
  target_link_libraries(${test_name} tide_engine GTest::gmock GTest::gtest_main)
  gtest_discover_tests(${test_name} TEST_PREFIX gpu. DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300
    ENVIRONMENT "NCCL_NVLS_ENABLE=0;TORCH_SYMM_MEM_DISABLE_MULTICAST=1;NVSHMEM_DISABLE_NVLS=1")
endforeach()
target_sources(gpu_cuda_engine_test PRIVATE
  ${CMAKE_SOURCE_DIR}/tests/unit/cuda_driver_fake.cc ${CMAKE_SOURCE_DIR}/tests/unit/cuda_multicast_fake.cc)

if(TIDE_NVCC)
  set(read_only ${CMAKE_BINARY_DIR}/read_only.fatbin)
  add_custom_command(OUTPUT ${read_only}
    COMMAND ${TIDE_NVCC} ${cuda_flags} -fatbin ${CMAKE_SOURCE_DIR}/tests/gpu/read_only.cu -o ${read_only}
    DEPENDS ${CMAKE_SOURCE_DIR}/tests/gpu/read_only.cu VERBATIM)
  add_custom_target(gpu_read_only DEPENDS ${read_only})
  add_executable(gpu_sum_rates EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/gpu/cuda_sum_rates.cc)
  add_dependencies(gpu_sum_rates gpu_read_only)
  target_link_libraries(gpu_sum_rates tide_engine GTest::gtest)
endif()
