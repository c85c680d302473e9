// Fibres on this CPU in place of a GPU's threads (tests/cpp/cuda/launcher.h), and faults on demand:
//
//   --machine-flip=N   one bit is wrong of what launch N, and what runs beside it, has written
//   --machine-drop=N   launch N does not take place
#include <algorithm>
#include <functional>
#include <new>
#include <stdexcept>
#include <utility>

#include "cuda/launcher.h"
#include "machine.h"

namespace fccl::gpu_check {
namespace {

using Function = void (*)(const void* args);

class HostMachine final : public Machine {
 public:
  HostMachine(std::uint64_t flip, std::uint64_t drop) : flip_(flip), drop_(drop) {}
  ~HostMachine() override { free_all(); }

  std::string name() const override { return "fibres on this CPU"; }
  bool is_fast() const override { return false; }
  unsigned multiprocessors() const override { return 2; }

  std::byte* allocate(std::size_t bytes) override { return allocate(bytes, device_memory_); }
  void* allocate_host(std::size_t bytes) override { return allocate(bytes, host_memory_); }
  void release_all() override {
    finish();
    free_all();
  }
  void copy_in(void* to, const void* from, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
  void copy_out(void* to, const void* from, std::size_t bytes) override { copy_in(to, from, bytes); }

  void launch(int stream, KernelEntry kernel, Grid grid, const void* args, std::size_t bytes) override {
    if (kernel.entry == nullptr) throw std::runtime_error("the tables have no such kernel");
    const std::uint64_t number = ++launches_;
    if (number == drop_) return;
    const auto function = reinterpret_cast<Function>(const_cast<void*>(kernel.entry));
    const auto* const first = static_cast<const std::byte*>(args);
    // Args may ask for 16 bytes' alignment, which operator new gives.
    const auto copy = std::make_shared<std::vector<std::byte>>(first, first + bytes);
    cuda::host::Launch launch{grid.blocks, grid.threads, 0, [function, copy] { function(copy->data()); }, {}};
    launcher_.add(stream, std::move(launch));
    if (number == flip_) before_ = contents();
  }
  void finish() override {
    const int trapped = launcher_.run();
    if (!before_.empty()) flip_one_bit();
    if (trapped != 0) throw std::runtime_error("the kernels: trapped");
  }

 private:
  struct Piece {
    std::byte* data;
    std::size_t bytes;
  };

  static std::byte* allocate(std::size_t bytes, std::vector<Piece>& pieces) {
    auto* const at = static_cast<std::byte*>(::operator new(bytes + 1, std::align_val_t{256}));
    std::memset(at, 0, bytes + 1);
    pieces.push_back({at, bytes});
    return at;
  }
  void free_all() {
    for (auto* const pieces : {&device_memory_, &host_memory_}) {
      for (const Piece& piece : *pieces) ::operator delete(piece.data, std::align_val_t{256});
      pieces->clear();
    }
  }

  std::vector<std::vector<std::byte>> contents() const {
    std::vector<std::vector<std::byte>> all;
    for (const Piece& piece : device_memory_) all.emplace_back(piece.data, piece.data + piece.bytes);
    return all;
  }
  // In one of the two pieces that were made last, of those that have changed: workspaces come before tensors.
  void flip_one_bit() {
    const auto before = std::exchange(before_, {});
    std::vector<std::vector<std::byte*>> changed;
    for (std::size_t p = before.size(); p-- > 0 && changed.size() < 2;) {
      std::vector<std::byte*> of_piece;
      for (std::size_t i = 0; i < before[p].size(); ++i) {
        if (device_memory_[p].data[i] != before[p][i]) of_piece.push_back(device_memory_[p].data + i);
      }
      if (!of_piece.empty()) changed.push_back(std::move(of_piece));
    }
    if (changed.empty()) return;
    const std::vector<std::byte*>& chosen = changed[flip_ % changed.size()];
    *chosen[chosen.size() / 2] ^= std::byte{1};
  }

  const std::uint64_t flip_;  // numbers of launches, from 1 on; 0: none
  const std::uint64_t drop_;
  std::uint64_t launches_ = 0;
  std::vector<std::vector<std::byte>> before_;  // empty: nothing is to be flipped
  cuda::host::Launcher launcher_{8};
  std::vector<Piece> device_memory_;
  std::vector<Piece> host_memory_;
};

}  // namespace

std::unique_ptr<Machine> make_machine(std::span<const std::string> options, std::string&) {
  std::uint64_t flip = 0;
  std::uint64_t drop = 0;
  for (const std::string& option : options) {
    const std::size_t value = option.find('=') + 1;
    if (option.starts_with("--machine-flip=")) {
      flip = std::stoull(option.substr(value));
    } else if (option.starts_with("--machine-drop=")) {
      drop = std::stoull(option.substr(value));
    } else {
      throw std::runtime_error(option + ": this machine has --machine-flip=N and --machine-drop=N");
    }
  }
  return std::make_unique<HostMachine>(flip, drop);
}

}  // namespace fccl::gpu_check
