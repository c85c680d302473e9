#include "common/description.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/text.h"

namespace fccl {

const char* name_of(Collective collective) noexcept {
  switch (collective) {
    case Collective::kNone: return "nothing";
    case Collective::kAllReduce: return "all_reduce";
    case Collective::kAllGather: return "all_gather";
    case Collective::kBroadcast: return "broadcast";
    case Collective::kBarrier: return "barrier";
    case Collective::kRejected: return "a rejected call";
    case Collective::kReduce: return "reduce";
    case Collective::kGather: return "gather";
    case Collective::kScatter: return "scatter";
    case Collective::kReduceScatter: return "reduce_scatter";
    case Collective::kAllToAll: return "all_to_all";
    case Collective::kSparseAllReduce: return "all_reduce of a sparse tensor";
    case Collective::kCompressedAllReduce: return "compressed_all_reduce";
    case Collective::kGpuSetup: return "gpu_setup";
  }
  return "unknown";
}

Description Description::of(Collective collective, DType dtype, std::uint64_t count, int root,
                            ReduceOp op) noexcept {
  Description call;
  call.collective = collective;
  call.dtype = dtype;
  call.count = count;
  call.root = root;
  call.reduce_op = op;
  return call;
}

Description Description::rejected(const std::string& why) noexcept {
  Description call;
  call.collective = Collective::kRejected;
  call.set_note(why);
  return call;
}

void Description::set_note(const std::string& text) noexcept { copy_text(text, note); }

void Description::validate() noexcept {
  if (static_cast<std::uint8_t>(collective) >= kCollectiveCount) collective = Collective::kNone;
  if (static_cast<std::uint8_t>(dtype) >= kDTypeCount) dtype = DType::kBytes;
  if (static_cast<std::uint8_t>(reduce_op) >= kReduceOpCount) reduce_op = ReduceOp::kSum;
  make_printable(note);
}

namespace {

bool has_op(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduce || c == Collective::kReduceScatter ||
         c == Collective::kSparseAllReduce;
}

bool has_root(Collective c) {
  return c == Collective::kBroadcast || c == Collective::kReduce || c == Collective::kGather ||
         c == Collective::kScatter;
}

// Rules: which fields must agree for calls of one collective to fit.
bool counts_must_agree(const Description& d) {
  return d.collective != Collective::kBarrier && (d.flags & Description::kUneven) == 0;
}

// The name of the first field in which `b` does not fit `a`, or nullptr.
const char* first_difference(const Description& a, const Description& b) {
  if (a.collective != b.collective) return "the operation";
  if (a.collective == Collective::kBarrier) return nullptr;
  if (a.dtype != b.dtype) return "the dtype";
  if (has_op(a.collective) && a.reduce_op != b.reduce_op) return "the reduce op";
  if (has_root(a.collective) && a.root != b.root) return "the root rank";
  if (a.tensors != b.tensors) return "the number of tensors";
  if (a.flags != b.flags) return "the form of the call";
  if (counts_must_agree(a) && a.count != b.count) return "the number of elements";
  if (a.output_count != b.output_count) {
    if (a.collective == Collective::kCompressedAllReduce) return "how the elements are coded";
    return a.flags == 0 ? "the number of output elements" : "the list of sizes";
  }
  return nullptr;
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i != 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

std::string Description::to_string() const {
  std::string text = name_of(collective);
  if (collective == Collective::kBarrier) return text + "()";
  if (collective == Collective::kNone) return text;
  if (collective == Collective::kRejected) return text + ": " + note;
  if (collective == Collective::kCompressedAllReduce) {
    return text + "(" + name_of(dtype) + ", " + note + ", count=" + std::to_string(count) + ", coded=#" +
           std::to_string(output_count) + ")";
  }
  text += std::string("(") + name_of(dtype) + ", count=" + std::to_string(count);
  if (output_count != 0) {
    text += flags != 0 ? ", sizes=#" + std::to_string(output_count)
                       : ", output_count=" + std::to_string(output_count);
  }
  if (tensors != 1) text += ", tensors=" + std::to_string(tensors);
  if (has_op(collective)) text += std::string(", op=") + name_of(reduce_op);
  if (has_root(collective)) text += ", root=" + std::to_string(root);
  // "The form of the call" may be all in which two calls differ.
  if ((flags & kUneven) != 0) text += ", uneven";
  return text + ")";
}

std::string check_compatible(std::span<const Description> calls) {
  const char* difference = nullptr;
  bool rejected = false;
  for (const Description& call : calls) {
    rejected = rejected || call.collective == Collective::kRejected;
    if (difference == nullptr) difference = first_difference(calls[0], call);
  }
  if (difference == nullptr && !rejected) return {};

  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    const std::string text = calls[rank].to_string();
    auto it = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == text; });
    if (it == groups.end()) it = groups.insert(groups.end(), {text, {}});
    it->second.push_back(static_cast<int>(rank));
  }
  std::string message = rejected
                            ? "a rank's call was rejected"
                            : std::string("ranks made calls that do not fit: ") + difference + " differs";
  for (const auto& [text, ranks] : groups) {
    const bool refused = calls[static_cast<std::size_t>(ranks[0])].collective == Collective::kRejected;
    message += "; " + list_of(ranks) + (refused ? " made " : " called ") + text;
  }
  message += rejected
                 ? ". No data was exchanged; correct the rejected call."
                 : ". No data was exchanged and the group stays usable; make the same call on every rank.";
  return message;
}

}  // namespace fccl
