// send and recv go straight to the inner Gloo, beside the executor: they take no number, and a recv
// may be outstanding while collectives run.
#include <c10/util/Exception.h>

#include <utility>

#include "c10d/backend.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

// A receive into memory of our own, put where the user wanted it by the first wait().
class StagedReceive final : public ::c10d::Work {
 public:
  StagedReceive(int rank, OpType type, c10::intrusive_ptr<::c10d::Work> inner, at::Tensor buffer,
                at::Tensor target)
      : ::c10d::Work(rank, type),
        inner_(std::move(inner)),
        buffer_(std::move(buffer)),
        target_(std::move(target)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const bool finished = inner_->wait(timeout);
    std::lock_guard lock(mutex_);
    if (finished && buffer_.defined()) {
      put_back(buffer_, target_);
      buffer_.reset();
    }
    return finished;
  }
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  void abort() override { inner_->abort(); }
  std::vector<at::Tensor> result() override { return {target_}; }
  std::uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  c10::intrusive_ptr<::c10d::Work> inner_;
  at::Tensor buffer_;
  at::Tensor target_;
};

// What was begun between startCoalescing() and endCoalescing().
class CoalescedWork final : public ::c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<::c10d::Work>> works)
      : ::c10d::Work(rank, OpType::COALESCED), works_(std::move(works)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }
  bool isCompleted() override {
    for (const auto& work : works_) {
      if (!work->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override {
    for (const auto& work : works_) {
      if (!work->isSuccess()) return false;
    }
    return true;
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto error = work->exception()) return error;
    }
    return nullptr;
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      const auto some = work->result();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (const auto& work : works_) futures.push_back(work->getFuture());
    auto all = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (futures.empty()) {
      all->markCompleted(c10::IValue(std::vector<at::Tensor>{}));
      return all;
    }
    auto left = std::make_shared<std::atomic<std::size_t>>(futures.size());
    for (const auto& future : futures) {
      future->addCallback([all, left, futures](c10::ivalue::Future&) {
        if (left->fetch_sub(1) != 1) return;
        std::vector<at::Tensor> values;
        for (const auto& each : futures) {
          if (each->hasError()) return all->setError(each->exception_ptr());
          for (const at::Tensor& value : each->value().toTensorVector()) values.push_back(value);
        }
        all->markCompleted(c10::IValue(values));
      });
    }
    return all;
  }

 private:
  std::vector<c10::intrusive_ptr<::c10d::Work>> works_;
};

std::string place(const char* name, int rank) {
  return std::string("fccl ") + name + " on rank " + std::to_string(rank) + ": ";
}

}  // namespace

::c10d::Backend& FcclBackend::point_to_point(const char* name, const at::Tensor& tensor, int peer) {
  // Its check for a forked child: the parent's connections are not the child's to use.
  const Call c = call(OpType::SEND, Collective::kNone, name, true, ::c10d::kUnsetTimeout);
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta()) {
    C10_THROW_ERROR(ValueError, place(name + sizeof("fccl:") - 1, rank_) + "the tensor is " +
                                    describe(tensor) + ", expected a dense (strided) tensor");
  }
  if (peer < -1 || peer >= size_ || peer == rank_) {
    C10_THROW_ERROR(ValueError, place(name + sizeof("fccl:") - 1, rank_) + "the peer is rank " +
                                    std::to_string(peer) + ", expected another rank of the group's " +
                                    std::to_string(size_));
  }
  if (shut_down_) {
    C10_THROW_ERROR(DistBackendError,
                    place(name + sizeof("fccl:") - 1, rank_) + "the process group has been destroyed");
  }
  if (tensor.is_cuda()) {
    return cuda(c, tensor);
  }
  if (!tensor.device().is_cpu() || !carrier_->inner()) {
    C10_THROW_ERROR(ValueError, place(name + sizeof("fccl:") - 1, rank_) + "the tensor is " +
                                    describe(tensor) + " in a group of " + std::to_string(size_) +
                                    ", expected a CPU tensor and a peer");
  }
  return *carrier_->inner();
}

FcclBackend::WorkPtr FcclBackend::track(WorkPtr work) {
  if (coalescing_.load(std::memory_order_relaxed)) {
    std::lock_guard lock(coalescing_mutex_);
    if (coalescing_ && coalescing_thread_ == std::this_thread::get_id()) coalesced_.push_back(work);
  }
  return work;
}

FcclBackend::WorkPtr FcclBackend::send(Tensors& tensors, int destination, int tag) {
  if (tensors.size() != 1) C10_THROW_ERROR(ValueError, place("send", rank_) + "expected exactly one tensor");
  ::c10d::Backend& inner = point_to_point("fccl:send", tensors[0], destination);
  if (tensors[0].is_cuda()) return inner.send(tensors, destination, tag);
  Tensors plain{readable(tensors[0])};
  return track(inner.send(plain, destination, tag));
}

FcclBackend::WorkPtr FcclBackend::recv(Tensors& tensors, int source, int tag) {
  if (tensors.size() != 1) C10_THROW_ERROR(ValueError, place("recv", rank_) + "expected exactly one tensor");
  ::c10d::Backend& inner = point_to_point("fccl:recv", tensors[0], source);
  if (tensors[0].is_cuda())
    return inner.recv(tensors, source, tag);  // coalesced, if at all, by the inner one
  if (is_plain(tensors[0])) return track(inner.recv(tensors, source, tag));
  Tensors plain{writable(tensors[0])};
  return track(c10::make_intrusive<StagedReceive>(rank_, OpType::RECV, inner.recv(plain, source, tag),
                                                  plain[0], tensors[0]));
}

FcclBackend::WorkPtr FcclBackend::recvAnysource(Tensors& tensors, int tag) {
  if (tensors.size() != 1) C10_THROW_ERROR(ValueError, place("recv", rank_) + "expected exactly one tensor");
  ::c10d::Backend& inner = point_to_point("fccl:recv", tensors[0], -1);
  if (tensors[0].is_cuda()) return inner.recvAnysource(tensors, tag);
  if (is_plain(tensors[0])) return track(inner.recvAnysource(tensors, tag));
  Tensors plain{writable(tensors[0])};
  return track(c10::make_intrusive<StagedReceive>(rank_, OpType::RECVANYSOURCE,
                                                  inner.recvAnysource(plain, tag), plain[0], tensors[0]));
}

// torch asks before batch_isend_irecv: NCCL needs a batch to be one group, Gloo does not.
bool FcclBackend::supportsCoalescing() const { return static_cast<bool>(cuda_factory_); }

void FcclBackend::startCoalescing() {
  {
    std::lock_guard lock(coalescing_mutex_);
    coalescing_thread_ = std::this_thread::get_id();
    coalesced_.clear();
    coalescing_ = true;
  }
  std::lock_guard lock(cuda_mutex_);
  if (cuda_inner_) cuda_inner_->startCoalescing();
}

FcclBackend::WorkPtr FcclBackend::endCoalescing() {
  std::vector<WorkPtr> works;
  {
    std::lock_guard lock(coalescing_mutex_);
    coalescing_ = false;
    works.swap(coalesced_);
  }
  {
    std::lock_guard lock(cuda_mutex_);
    if (cuda_inner_) {
      if (auto work = cuda_inner_->endCoalescing()) works.push_back(std::move(work));
    }
  }
  return c10::make_intrusive<CoalescedWork>(rank_, std::move(works));
}

}  // namespace fccl::c10d_backend
