// torch's Store as the engine sees it.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "cpu/group.h"

namespace fccl::c10d_backend {

class StoreAdapter final : public cpu::KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;

  // Closes the connection of its own; a later call opens another.
  void release() noexcept;

 private:
  ::c10d::Store& connection();

  std::mutex mutex_;
  c10::intrusive_ptr<::c10d::Store> store_;
  // A clone, because a TCPStore serves one call at a time: another thread that waits in the
  // original (new_group does) would hold up ranks that it waits for.
  c10::intrusive_ptr<::c10d::Store> connection_;
};

// The part of a group's store that an inner backend for `device` has.
c10::intrusive_ptr<::c10d::Store> inner_store(const c10::intrusive_ptr<::c10d::Store>& store,
                                              const char* device);

}  // namespace fccl::c10d_backend
