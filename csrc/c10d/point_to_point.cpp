// send and recv, beside the executor: they take no number, and a recv may be outstanding while collectives
// run. Where ranks do not share memory they go straight to the inner Gloo.
#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "c10d/backend.h"
#include "c10d/errors.h"
#include "c10d/gpu_engine.h"
#include "c10d/process.h"
#include "cpu/point_to_point.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

// A receive over Gloo into memory of our own, put where the user wanted it by the first wait().
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
    if (futures.size() == 1) return futures[0];
    // A Future takes no value that lies on a device it was not made for.
    std::vector<c10::Device> devices;
    for (const auto& future : futures) {
      for (const c10::Device& device : future->devices()) {
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
      }
    }
    auto all = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                        std::move(devices));
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
          each->wait();  // complete for the host; makes the current streams, which `all` records, wait
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

// A send or a receive on the engine. A strided tensor is sent from, or received into, memory of our own.
class Message final : public CollectiveWork {
 public:
  Message(int rank, OpType type, const char* title, const std::shared_ptr<Carrier>& carrier,
          at::Tensor tensor, at::Tensor plain, std::chrono::milliseconds timeout)
      : CollectiveWork(rank, type, title, {tensor}, {tensor}, nullptr),
        carrier_(carrier),
        tensor_(std::move(tensor)),
        plain_(std::move(plain)),
        timeout_(timeout) {}

  void begin(int peer, int tag) {
    const auto request = std::make_shared<cpu::Request>();
    request_ = request;
    request->sends = opType_ == OpType::SEND;
    request->data = static_cast<std::byte*>(const_cast<void*>(
        request->sends ? plain_.const_data_ptr() : static_cast<const void*>(plain_.mutable_data_ptr())));
    request->count = static_cast<std::size_t>(plain_.numel());
    request->dtype = dtype_of(plain_.scalar_type());
    request->peer = peer;
    request->tag = tag;
    // The message goes on whatever the caller does with this work; the tensors stay until it has ended.
    request->at_end = [self =
                           c10::weak_intrusive_ptr<Message>(c10::intrusive_ptr<Message>::reclaim_copy(this)),
                       tensor = tensor_, plain = plain_](const cpu::Request& ended) {
      const std::exception_ptr error = outcome(ended, tensor, plain);
      if (const auto alive = self.lock()) alive->complete(error);
    };
    try {
      carrier_.lock()->group()->point_to_point().post(request);
    } catch (const Error& error) {
      request->at_end = nullptr;
      throw_as_torch(error);
    }
  }

  bool isCompleted() override {
    if (!is_done()) {
      const GilRelease unlocked;  // before the carrier, whose last reference this may be
      try {
        if (const auto carrier = carrier_.lock(); carrier && carrier->group() != nullptr)
          carrier->group()->point_to_point().test(*request_);
      } catch (const Error& error) {
        throw_as_torch(error);
      }
    }
    return is_done();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!is_done()) {
      const GilRelease unlocked;  // before the carrier, whose last reference this may be
      const auto carrier = carrier_.lock();
      TORCH_CHECK(carrier && carrier->group() != nullptr, title(),
                  ": the process group is gone, or stays with the parent of this process");
      cpu::PointToPoint& engine = carrier->group()->point_to_point();
      const bool limited = timeout > std::chrono::milliseconds::zero();
      try {
        engine.wait(*request_, Deadline::after(limited ? timeout : timeout_));
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kTimeout) {
          // Once its own time is up, and not just this wait's, it must not take what is meant for the next
          // receive.
          const bool withdrawn = !limited && engine.withdraw(request_);
          throw_as_torch(
              Error(error.kind(), error.what() + std::string(withdrawn ? ". It has been given up"
                                                                       : ". It goes on, and its work can be "
                                                                         "waited for again")));
        }
        if (!is_done()) throw_as_torch(error);
      } catch (...) {  // Ctrl-C
        engine.withdraw(request_);
        throw;
      }
    }
    rethrow();
    return true;
  }
  int sourceRank() const override { return request_->peer; }
  void abort() override {
    C10_THROW_ERROR(NotImplementedError, "fccl: one message cannot be aborted alone; abort the group");
  }

 private:
  static std::exception_ptr outcome(const cpu::Request& request, const at::Tensor& tensor,
                                    const at::Tensor& plain) noexcept {
    try {
      if (request.error) throw_as_torch(*request.error);
      if (!request.sends) put_back(plain, tensor);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  // A work that is kept does not keep the group: what is pending ends with it.
  const std::weak_ptr<Carrier> carrier_;
  at::Tensor tensor_;
  at::Tensor plain_;
  const std::chrono::milliseconds timeout_;
  cpu::RequestPtr request_;
};

std::string place(const char* name, int rank) {
  return std::string("fccl ") + name + " on rank " + std::to_string(rank) + ": ";
}

}  // namespace

FcclBackend::Call FcclBackend::point_to_point(OpType type, const char* title, const Tensors& tensors,
                                              int peer) {
  // Checks that this is no forked child: the parent's connections are not the child's to use.
  const Call c = call(type, Collective::kNone, title, true, ::c10d::kUnsetTimeout);
  const std::string here = place(title + sizeof("fccl:") - 1, rank_);
  if (tensors.size() != 1) C10_THROW_ERROR(ValueError, here + "expected exactly one tensor");
  const at::Tensor& tensor = tensors[0];
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta()) {
    C10_THROW_ERROR(ValueError,
                    here + "the tensor is " + describe(tensor) + ", expected a dense (strided) tensor");
  }
  const bool from_any = type == OpType::RECVANYSOURCE;
  if (!from_any && (peer < 0 || peer >= size_ || peer == rank_)) {
    C10_THROW_ERROR(ValueError, here + "the peer is rank " + std::to_string(peer) +
                                    ", expected another rank of the group's " + std::to_string(size_));
  }
  if (shut_down_) C10_THROW_ERROR(DistBackendError, here + "the process group has been destroyed");
  if (!tensor.is_cuda() && (!tensor.device().is_cpu() || size_ == 1)) {
    C10_THROW_ERROR(ValueError, here + "the tensor is " + describe(tensor) + " in a group of " +
                                    std::to_string(size_) + ", expected a CPU tensor and a peer");
  }
  if (type != OpType::SEND && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    C10_THROW_ERROR(ValueError,
                    here + "elements of the tensor share memory (expand()?); receive into a clone");
  }
  return c;
}

FcclBackend::WorkPtr FcclBackend::begin_message(const Call& c, const at::Tensor& tensor, int peer, int tag) {
  const bool sends = c.type == OpType::SEND;
  auto message = c10::make_intrusive<Message>(rank_, c.type, c.title, carrier_, tensor,
                                              sends ? readable(tensor) : writable(tensor), c.timeout);
  const GilRelease unlocked;
  message->begin(peer, tag);
  return track(std::move(message));
}

FcclBackend::WorkPtr FcclBackend::track(WorkPtr work) {
  if (coalescing_.load(std::memory_order_relaxed)) {
    std::lock_guard lock(coalescing_mutex_);
    if (coalescing_ && coalescing_thread_ == std::this_thread::get_id()) coalesced_.push_back(work);
  }
  return work;
}

FcclBackend::WorkPtr FcclBackend::send(Tensors& tensors, int destination, int tag) {
  const Call c = point_to_point(OpType::SEND, "fccl:send", tensors, destination);
  if (tensors[0].is_cuda())
    return on_cuda(c, tensors[0],
                   [&](::c10d::Backend& inner) { return inner.send(tensors, destination, tag); });
  if (carrier_->mode() == Carrier::Mode::kEngine) return begin_message(c, tensors[0], destination, tag);
  Tensors plain{readable(tensors[0])};
  return track(carrier_->inner()->send(plain, destination, tag));
}

FcclBackend::WorkPtr FcclBackend::recv(Tensors& tensors, int source, int tag) {
  const Call c = point_to_point(OpType::RECV, "fccl:recv", tensors, source);
  // Coalesced, if at all, by the inner one.
  if (tensors[0].is_cuda())
    return on_cuda(c, tensors[0], [&](::c10d::Backend& inner) { return inner.recv(tensors, source, tag); });
  if (carrier_->mode() == Carrier::Mode::kEngine) return begin_message(c, tensors[0], source, tag);
  if (is_plain(tensors[0])) return track(carrier_->inner()->recv(tensors, source, tag));
  Tensors plain{writable(tensors[0])};
  return track(c10::make_intrusive<StagedReceive>(
      rank_, OpType::RECV, carrier_->inner()->recv(plain, source, tag), plain[0], tensors[0]));
}

FcclBackend::WorkPtr FcclBackend::recvAnysource(Tensors& tensors, int tag) {
  const Call c = point_to_point(OpType::RECVANYSOURCE, "fccl:recvAnySource", tensors, -1);
  if (tensors[0].is_cuda())
    return on_cuda(c, tensors[0], [&](::c10d::Backend& inner) { return inner.recvAnysource(tensors, tag); });
  if (carrier_->mode() == Carrier::Mode::kEngine) return begin_message(c, tensors[0], -1, tag);
  if (is_plain(tensors[0])) return track(carrier_->inner()->recvAnysource(tensors, tag));
  Tensors plain{writable(tensors[0])};
  return track(c10::make_intrusive<StagedReceive>(
      rank_, OpType::RECVANYSOURCE, carrier_->inner()->recvAnysource(plain, tag), plain[0], tensors[0]));
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
  if (cuda_inner_ && !cuda_by_gloo_) cuda_inner_->startCoalescing();
}

FcclBackend::WorkPtr FcclBackend::endCoalescing() {
  std::vector<WorkPtr> works;
  {
    std::lock_guard lock(coalescing_mutex_);
    coalescing_ = false;
    works.swap(coalesced_);
  }
  BackendPtr nccl;
  {
    std::lock_guard lock(cuda_mutex_);
    nccl = cuda_inner_;
  }
  if (nccl && !cuda_by_gloo_) {
    auto work = nccl->endCoalescing();  // whatever has failed: NCCL's own group of calls must end
    const auto gpu = gpu_engine();
    if (gpu && std::exchange(coalesced_on_gpu_, false)) gpu->end_coalesced(work.get());
    if (work) works.push_back(std::move(work));
  }
  return c10::make_intrusive<CoalescedWork>(rank_, std::move(works));
}

}  // namespace fccl::c10d_backend
