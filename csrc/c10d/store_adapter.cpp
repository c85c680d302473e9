#include "c10d/store_adapter.h"

#include <cstdint>
#include <exception>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace fccl::c10d_backend {

::c10d::Store& StoreAdapter::connection() {
  if (!connection_) {
    try {
      connection_ = store_->clone();
    } catch (const std::exception&) {
      connection_ = store_;  // a Store written in Python need not have clone()
    }
  }
  return *connection_;
}

void StoreAdapter::set(const std::string& key, const std::string& value) {
  std::lock_guard lock(mutex_);
  connection().set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

std::optional<std::string> StoreAdapter::try_get(const std::string& key) {
  std::lock_guard lock(mutex_);
  if (!connection().check({key})) return std::nullopt;
  const std::vector<std::uint8_t> value = connection().get(key);
  return std::string(value.begin(), value.end());
}

void StoreAdapter::release() noexcept {
  std::lock_guard lock(mutex_);
  connection_.reset();
}

c10::intrusive_ptr<::c10d::Store> inner_store(const c10::intrusive_ptr<::c10d::Store>& store,
                                              const char* device) {
  return c10::make_intrusive<::c10d::PrefixStore>(std::string("inner/") + device, store);
}

}  // namespace fccl::c10d_backend
