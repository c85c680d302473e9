// How the ranks of a group talk while their GPUs come to share memory: over the CPU engine.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/carrier.h"
#include "cuda/peers.h"

namespace fccl::c10d_backend {

// For the body of one call of the group, on the shared-memory engine.
class CarrierPeers final : public cuda::Peers {
 public:
  CarrierPeers(Carrier& carrier, const Deadline& deadline) : carrier_(carrier), deadline_(deadline) {}

  int rank() const override { return carrier_.rank(); }
  int size() const override { return carrier_.size(); }
  std::vector<std::byte> all_gather(std::span<const std::byte> own) override {
    const auto bytes = static_cast<std::int64_t>(own.size());
    const at::Tensor input = at::empty({bytes}, at::kByte);
    const at::Tensor output = at::empty({bytes * size()}, at::kByte);
    std::memcpy(input.mutable_data_ptr(), own.data(), own.size());
    carrier_.all_gather_equal(input, output, deadline_);
    std::vector<std::byte> all(static_cast<std::size_t>(output.numel()));
    std::memcpy(all.data(), output.const_data_ptr(), all.size());
    return all;
  }
  std::vector<Descriptor> exchange(const Descriptor& own) override {
    return carrier_.group()->exchange_descriptors(own, deadline_);
  }
  // Also what a peer that makes another call meanwhile is found out by.
  void barrier() override {
    carrier_.gate(Description::of(Collective::kGpuSetup, DType::kBytes, 0), deadline_);
  }

 private:
  Carrier& carrier_;
  const Deadline& deadline_;
};

}  // namespace fccl::c10d_backend
