// The fabric of GPUs of one host: copy engines, few short kernels, stream waits. Enqueuing
// (enqueuing_fabric.h): a queue is a stream, made at the queue's first use.
//
// Built on a host fabric, which introduces the ranks, hears of their ends and carries descriptors
// and votes; host() gives it to the engine for what the processor reads (records of calls). Several
// ranks may share a GPU.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "kernels/cuda_images.h"
#include "transports/cuda/driver_api.h"
#include "transports/enqueuing_fabric.h"
#include "transports/host/host_fabric.h"

namespace tide {

struct CudaFabricOptions {
  HostFabricOptions host;
  int device = 0;   // ordinal in this process
  int queues = 12;  // queue numbers are below
  Result<cuda::DriverApi> api = Status(ErrorKind::kInternal, "no driver given");
  Result<std::vector<cuda::KernelImage>> images = Status(ErrorKind::kInternal, "no kernels given");
  Status multicast;  // OK, or why this rank does not want it: then none of the group has it
  // Called once by a create_window that finds too little memory, before its second try: lets go of
  // what this process keeps in reserve. May be empty.
  std::function<void()> make_room;
};

class CudaFabric : public EnqueuingFabric {
 public:
  // The queue's stream, a CUstream: for events of the caller, never for work.
  virtual void* stream(int queue) = 0;
};

// Collective. Any rank's reason (no driver, no kernels, no peer access, MIG, too few connections,
// different nodes) is the answer on all ranks.
Result<std::unique_ptr<CudaFabric>> connect_cuda_fabric(const CudaFabricOptions& options,
                                                        KeyValueStore& store);

}  // namespace tide
