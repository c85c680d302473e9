#include "c10d/tensors.h"

#include <sstream>

namespace fccl::c10d_backend {

DType dtype_of(at::ScalarType type) noexcept {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kChar: return DType::kInt8;
    case at::kShort: return DType::kInt16;
    case at::kInt: return DType::kInt32;
    case at::kLong: return DType::kInt64;
    case at::kByte: return DType::kUInt8;
    case at::kBool: return DType::kBool;
    case at::kComplexFloat: return DType::kComplex64;
    case at::kComplexDouble: return DType::kComplex128;
    case at::kFloat8_e4m3fn: return DType::kFloat8E4M3;
    case at::kFloat8_e5m2: return DType::kFloat8E5M2;
    default: break;
  }
  switch (c10::elementSize(type)) {
    case 1: return DType::kOther1;
    case 2: return DType::kOther2;
    case 4: return DType::kOther4;
    case 8: return DType::kOther8;
    case 16: return DType::kOther16;
    default: return DType::kBytes;
  }
}

std::string type_name(at::ScalarType type) {
  const DType known = dtype_of(type);
  return known >= DType::kOther1 || known == DType::kBytes ? c10::toString(type) : name_of(known);
}

std::string plan_reduction(at::ScalarType type, const ::c10d::ReduceOp& op, Reduction& out) {
  using Op = ::c10d::ReduceOp::RedOpType;
  out.dtype = dtype_of(type);
  switch (op.op_) {
    case Op::SUM: out.op = ReduceOp::kSum; break;
    case Op::AVG: out.op = ReduceOp::kAvg; break;
    case Op::PRODUCT: out.op = ReduceOp::kProduct; break;
    case Op::MIN: out.op = ReduceOp::kMin; break;
    case Op::MAX: out.op = ReduceOp::kMax; break;
    case Op::BAND: out.op = ReduceOp::kBand; break;
    case Op::BOR: out.op = ReduceOp::kBor; break;
    case Op::BXOR: out.op = ReduceOp::kBxor; break;
    case Op::PREMUL_SUM: {
      // The name that all versions of torch have; newer ones prefer it without NCCL.
      const auto* supplement = dynamic_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (supplement == nullptr)
        return "PREMUL_SUM without a factor, expected one made by _make_nccl_premul_sum";
      if (!c10::isFloatingType(type)) {
        return "PREMUL_SUM on " + type_name(type) + ", expected a floating-point tensor";
      }
      out.op = ReduceOp::kSum;
      out.premultiply = true;
      out.factor = supplement->tensor_factor;
      out.scale = supplement->double_factor;
      break;
    }
    default: return "an unknown reduce op, expected one of torch.distributed.ReduceOp";
  }
  if ((type == at::kComplexFloat || type == at::kComplexDouble) &&
      (out.op == ReduceOp::kSum || out.op == ReduceOp::kAvg)) {
    out.dtype = type == at::kComplexFloat ? DType::kFloat32 : DType::kFloat64;
    out.per_element = 2;
  }
  if (!can_reduce(out.dtype, out.op)) {
    const bool complex = c10::isComplexType(type);
    return std::string("reduce op ") + name_of(out.op) + " is not defined for " + type_name(type) +
           (complex                     ? " tensors, expected sum or avg"
            : out.dtype == DType::kBool ? " tensors, expected any op but avg"
            : c10::isFloatingType(type) && can_reduce(out.dtype, ReduceOp::kSum)
                ? " tensors, expected sum, avg, product, min or max"
                : " tensors, expected a float16, bfloat16, float32, float64, int8 to int64, uint8, bool or "
                  "complex tensor");
  }
  return {};
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  if (!tensor.defined()) return "an undefined tensor";
  text << type_name(tensor.scalar_type()) << tensor.sizes() << " on " << tensor.device();
  if (tensor.layout() != at::kStrided) text << " with layout " << tensor.layout();
  return text.str();
}

at::Tensor readable(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;
  PlainDispatch guard;
  at::Tensor copy = scratch(tensor.numel(), tensor).view(tensor.sizes());
  copy.copy_(tensor);
  return copy;
}

at::Tensor writable(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;
  PlainDispatch guard;
  return scratch(tensor.numel(), tensor).view(tensor.sizes());
}

void put_back(const at::Tensor& result, const at::Tensor& tensor) {
  if (result.is_same(tensor)) return;
  PlainDispatch guard;
  at::Tensor target = tensor;
  target.copy_(result);
}

at::Tensor scratch(std::int64_t count, const at::Tensor& like) {
  PlainDispatch guard;
  return at::empty({count}, at::TensorOptions().dtype(like.scalar_type()).device(like.device()));
}

at::Tensor premultiplied(const at::Tensor& tensor, const Reduction& reduction) {
  PlainDispatch guard;
  const at::Tensor plain = readable(tensor);
  // One rounding: the product of 16-bit floats is formed in fp32.
  const at::Tensor factor = reduction.factor.defined()
                                ? reduction.factor.to(at::kCPU, at::kDouble).reshape({})
                                : at::scalar_tensor(reduction.scale, at::TensorOptions().dtype(at::kDouble));
  return at::mul(plain, factor).to(plain.scalar_type()).contiguous();
}

at::Tensor bytes_of(const at::Tensor& plain) {
  PlainDispatch guard;
  // The view keeps the tensor: an inner backend may go on with it after our wait was given up.
  return at::from_blob(
      const_cast<void*>(plain.const_data_ptr()), {static_cast<std::int64_t>(byte_count(plain))},
      [plain](void*) {}, at::TensorOptions().dtype(at::kByte));
}

bool overlaps(const at::Tensor& a, const at::Tensor& b) {
  const auto* a0 = static_cast<const char*>(a.const_data_ptr());
  const auto* b0 = static_cast<const char*>(b.const_data_ptr());
  return a0 < b0 + byte_count(b) && b0 < a0 + byte_count(a);
}

}  // namespace fccl::c10d_backend
