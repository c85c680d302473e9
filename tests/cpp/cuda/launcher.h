// Runs kernels on a CPU: every thread of every block is a fibre of the calling OS thread.
//
//   plain    threads take turns in order. With one process per rank over shared memory, or all ranks here.
//   seeded   threads are resumed at random; ranks and threads stall now and then; stores to peers are held
//            back (seam_host.h). Equal seeds give equal runs: time is the number of turns.
//
// A rank's launches run one after the other, as in a CUDA stream; those of different ranks run at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace fccl::cuda::host {

struct Launch {
  unsigned blocks = 1;
  unsigned threads = 1;
  std::size_t shared_bytes = 0;
  std::function<void()> kernel;  // called by each thread
  std::function<void()> after;   // called once, when all threads have ended
};

class Launcher {
 public:
  // Seeded if `seed` is given. A seeded run gives up after `most_turns` (throws std::runtime_error): nothing
  // made progress any more.
  explicit Launcher(int ranks, std::optional<std::uint64_t> seed = std::nullopt,
                    std::uint64_t most_turns = 20'000'000);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Appends a launch to the rank's stream.
  void add(int rank, Launch launch);
  template <class Kernel>
  void add(int rank, unsigned blocks, unsigned threads, const typename Kernel::Args& args,
           std::function<void()> after = {});

  // Runs every launch. Returns how many ranks' streams a trap() ended.
  int run();

 private:
  struct Fibre;
  struct Stream;
  class Turns;
  std::unique_ptr<Turns> turns_;
};

template <class Kernel, class = void>
inline constexpr std::size_t shared_size_of = 0;
template <class Kernel>
inline constexpr std::size_t shared_size_of<Kernel, std::void_t<typename Kernel::Shared>> =
    sizeof(typename Kernel::Shared);

template <class Kernel>
void Launcher::add(int rank, unsigned blocks, unsigned threads, const typename Kernel::Args& args,
                   std::function<void()> after) {
  add(rank, Launch{blocks, threads, shared_size_of<Kernel>, [args] { Kernel::run(args); }, std::move(after)});
}

}  // namespace fccl::cuda::host
