#include "cuda/launcher.h"

#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <random>
#include <stdexcept>
#include <utility>

#include "cuda/seam.h"

namespace fccl::cuda::host {
namespace {

constexpr std::size_t kStackBytes = 64 << 10;
constexpr std::uint64_t kNanosecondsPerTurn = 10;

}  // namespace

struct Launcher::Fibre {
  Thread thread;
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Stream* stream = nullptr;
  bool ended = true;
  std::uint64_t asleep_until = 0;
  void* tsan = nullptr;
};

// The launches of one rank, and the one that runs.
struct Launcher::Stream {
  std::deque<Launch> launches;
  std::vector<Block> blocks;
  std::vector<Fibre*> fibres;  // of the launch that runs
  std::size_t alive = 0;
  std::size_t next = 0;  // plain: whose turn it is
  std::uint64_t asleep_until = 0;
  bool trapped = false;
  // What ended blocks left unreleased: an end of a launch makes nothing visible to peers, the next release
  // does.
  std::vector<PeerStore> held_back;
  char boundary = 0;  // for ThreadSanitizer: one launch happens before the next
};

class Launcher::Turns final : public Scheduler {
 public:
  Turns(int ranks, std::optional<std::uint64_t> seed, std::uint64_t most_turns)
      : streams(static_cast<std::size_t>(ranks)),
        seeded_(seed),
        random_(seed.value_or(0)),
        most_turns_(most_turns) {}

  ~Turns() override {
#if defined(FCCL_THREAD_SANITIZER)
    for (const auto& fibre : pool_) __tsan_destroy_fiber(fibre->tsan);
#endif
  }

  FCCL_UNWATCHED int run() {
#if defined(FCCL_THREAD_SANITIZER)
    main_tsan_ = __tsan_get_current_fiber();
#endif
    for (Stream& stream : streams) begin(stream);
    std::vector<Stream*> active;
    for (Stream& stream : streams) {
      if (stream.alive > 0) active.push_back(&stream);
    }
    while (!active.empty()) {
      if (++turn_ > most_turns_ && seeded_) throw std::runtime_error("the kernels make no progress any more");
      Stream& stream = *active[seeded_ ? below(active.size()) : turn_ % active.size()];
      if (seeded_) disturb(stream);
      Fibre* fibre = seeded_ ? pick_at_random(stream) : pick_next(stream);
      if (!fibre) continue;
      resume(*fibre);
      if (!fibre->ended) continue;
      if (stream.trapped) stop(stream);
      if (--stream.alive == 0) {
        end(stream);
        begin(stream);
        if (stream.alive == 0) active.erase(std::find(active.begin(), active.end(), &stream));
      }
    }
    for (Stream& stream : streams) commit(stream.held_back);
    return traps_;
  }

  FCCL_UNWATCHED void yield() override {
    Fibre& fibre = *current_;
    switch_tsan(main_tsan_);
    swapcontext(&fibre.context, &main_);
  }

  std::uint64_t clock_ns() override {
    if (seeded_) return turn_ * kNanosecondsPerTurn;
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }

  void make_visible(std::vector<PeerStore>& stores) override {
    move_stores(current_->stream->held_back, stores);
    commit(stores);
  }

  std::vector<Stream> streams;

 private:
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }

  FCCL_UNWATCHED static void switch_tsan([[maybe_unused]] void* to) {
#if defined(FCCL_THREAD_SANITIZER)
    constexpr unsigned kOrdersNothing = 1;
    __tsan_switch_to_fiber(to, kOrdersNothing);
#endif
  }

  void commit(std::vector<PeerStore>& stores) {
    std::shuffle(stores.begin(), stores.end(), random_);
    for (const PeerStore& store : stores) std::memcpy(store.to, store.bytes, store.size);
    stores.clear();
  }

  // What a GPU does unasked: a rank or a thread stalls, a store becomes visible before its release.
  void disturb(Stream& stream) {
    if (below(2000) == 0) stream.asleep_until = turn_ + below(4000);
    if (below(200) == 0) stream.fibres[below(stream.fibres.size())]->asleep_until = turn_ + below(1000);
    if (below(20) == 0) {
      std::vector<PeerStore>& stores = stream.fibres[below(stream.fibres.size())]->thread.block->held_back;
      if (stores.empty()) return;
      std::swap(stores[below(stores.size())], stores.back());
      std::memcpy(stores.back().to, stores.back().bytes, stores.back().size);
      stores.pop_back();
    }
  }

  FCCL_UNWATCHED bool can_run(const Fibre& fibre) const {
    if (fibre.ended || fibre.asleep_until > turn_) return false;
    const Thread& thread = fibre.thread;
    return !thread.waits_in || thread.waits_in->round != thread.waits_round;
  }
  Fibre* pick_at_random(Stream& stream) {
    if (stream.asleep_until > turn_) return nullptr;
    const std::size_t count = stream.fibres.size();
    const std::size_t first = below(count);
    for (std::size_t i = 0; i < count; ++i) {
      Fibre* fibre = stream.fibres[(first + i) % count];
      if (can_run(*fibre)) return fibre;
    }
    return nullptr;
  }
  FCCL_UNWATCHED Fibre* pick_next(Stream& stream) {
    const std::size_t count = stream.fibres.size();
    for (std::size_t i = 0; i < count; ++i) {
      Fibre* fibre = stream.fibres[stream.next];
      stream.next = (stream.next + 1) % count;
      if (can_run(*fibre)) return fibre;
    }
    return nullptr;
  }

  // Makes the fibres of the stream's next launch, if there is one.
  void begin(Stream& stream) {
    stream.fibres.clear();
    stream.next = 0;
    if (stream.launches.empty()) return;
    const Launch& launch = stream.launches.front();
    stream.blocks.assign(launch.blocks, Block{});
    for (unsigned b = 0; b < launch.blocks; ++b) {
      Block& block = stream.blocks[b];
      block.index = b;
      block.count = launch.blocks;
      block.threads = launch.threads;
      block.all.expected = launch.threads;
      block.warps.resize((launch.threads + kWarpSize - 1) / kWarpSize);
      for (unsigned w = 0; w < block.warps.size(); ++w) {
        block.warps[w].expected = std::min<unsigned>(kWarpSize, launch.threads - w * kWarpSize);
      }
      block.words.resize(launch.threads);
      block.shared.assign(launch.shared_bytes, 0xa5);  // never what a kernel might hope for
      for (unsigned t = 0; t < launch.threads; ++t) stream.fibres.push_back(make(stream, block, t));
    }
    stream.alive = stream.fibres.size();
    FCCL_HB_RELEASE(&stream.boundary);
  }

  Fibre* make(Stream& stream, Block& block, unsigned index) {
    Fibre* fibre;
    if (free_.empty()) {
      pool_.push_back(std::make_unique<Fibre>());
      fibre = pool_.back().get();
#if defined(FCCL_THREAD_SANITIZER)
      fibre->tsan = __tsan_create_fiber(0);
#endif
    } else {
      fibre = free_.back();
      free_.pop_back();
    }
    fibre->stream = &stream;
    fibre->ended = false;
    fibre->asleep_until = 0;
    fibre->thread = Thread{this, &block, index, seeded_.has_value(), nullptr, 0, {}};
    getcontext(&fibre->context);
    fibre->context.uc_stack.ss_sp = fibre->stack.get();
    fibre->context.uc_stack.ss_size = kStackBytes;
    fibre->context.uc_link = nullptr;
    makecontext(&fibre->context, &Turns::start, 0);
    return fibre;
  }

  FCCL_UNWATCHED static void start() {
    Fibre& fibre = *current_;
    Turns& turns = static_cast<Turns&>(*fibre.thread.scheduler);
    FCCL_HB_ACQUIRE(&fibre.stream->boundary);
    try {
      fibre.stream->launches.front().kernel();
    } catch (const Trapped&) {
      ++turns.traps_;
      fibre.stream->trapped = true;
    }
    if (fibre.thread.delay) move_stores(fibre.thread.held_back, fibre.stream->held_back);
    fibre.ended = true;
    FCCL_HB_RELEASE(&fibre.stream->boundary);
    turns.yield();  // never resumed
  }

  FCCL_UNWATCHED void resume(Fibre& fibre) {
    current_ = &fibre;
    running = &fibre.thread;
    switch_tsan(fibre.tsan);
    swapcontext(&main_, &fibre.context);
    running = nullptr;
  }

  // A trap ends all threads of the launch where they are, and the launches after it.
  void stop(Stream& stream) {
    stream.alive = 1;
    stream.launches.resize(1);
  }

  void end(Stream& stream) {
    FCCL_HB_ACQUIRE(&stream.boundary);
    for (Block& block : stream.blocks) move_stores(block.held_back, stream.held_back);
    for (Fibre* fibre : stream.fibres) free_.push_back(fibre);
    if (stream.launches.front().after) stream.launches.front().after();
    stream.launches.pop_front();
  }

  const std::optional<std::uint64_t> seeded_;
  std::mt19937_64 random_;
  const std::uint64_t most_turns_;
  std::uint64_t turn_ = 0;
  int traps_ = 0;
  ucontext_t main_{};
  void* main_tsan_ = nullptr;
  std::vector<std::unique_ptr<Fibre>> pool_;
  std::vector<Fibre*> free_;
  static thread_local Fibre* current_;
};

thread_local Launcher::Fibre* Launcher::Turns::current_ = nullptr;

Launcher::Launcher(int ranks, std::optional<std::uint64_t> seed, std::uint64_t most_turns)
    : turns_(std::make_unique<Turns>(ranks, seed, most_turns)) {}
Launcher::~Launcher() = default;

void Launcher::add(int rank, Launch launch) {
  turns_->streams.at(static_cast<std::size_t>(rank)).launches.push_back(std::move(launch));
}

int Launcher::run() { return turns_->run(); }

}  // namespace fccl::cuda::host
