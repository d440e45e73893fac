#include "comm/process_group.h"

#include <sstream>

#include "comm/internal/arguments.h"
#include "core/check.h"
#include "core/internal/cuda_device.h"

namespace shardbook {

using internal::Arguments;

namespace {

const char* reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMax:
      return "max";
    default:
      return "min";
  }
}

// Tells the observer when the caller has waited.
class ObservedState : public Work::State {
 public:
  ObservedState(Work inner, CommObserver* observer, CommRecord record)
      : inner_(std::move(inner)),
        observer_(observer),
        record_(std::move(record)) {}
  void wait() override {
    inner_.wait();
    observer_->on_complete(record_);
  }
  bool done() override { return inner_.done(); }

 private:
  Work inner_;
  CommObserver* observer_;
  CommRecord record_;
};

}  // namespace

std::string call_text(const CommCall& call) {
  std::ostringstream text;
  text << comm_op_name(call.op);
  if (call.op == CommOp::kBarrier) {
    if (!call.label.empty()) text << " '" << call.label << "'";
    return text.str();
  }
  text << " " << dtype_name(call.dtype) << "[" << call.numel << "]";
  switch (call.op) {
    case CommOp::kAllReduce:
    case CommOp::kReduceScatter:
      if (call.reduce_op != ReduceOp::kSum) {
        text << " (" << reduce_op_name(call.reduce_op) << ")";
      }
      break;
    case CommOp::kReduce:
      text << " (";
      if (call.reduce_op != ReduceOp::kSum) {
        text << reduce_op_name(call.reduce_op) << ", ";
      }
      text << "root " << call.root_or_peer << ")";
      break;
    case CommOp::kBroadcast:
    case CommOp::kScatter:
    case CommOp::kGather:
      text << " (root " << call.root_or_peer << ")";
      break;
    case CommOp::kSend:
    case CommOp::kRecv:
      text << (call.op == CommOp::kSend ? " to" : " from") << " rank "
           << call.root_or_peer;
      if (call.tag != 0) text << " (tag " << call.tag << ")";
      break;
    default:
      break;
  }
  if (!call.label.empty()) text << " '" << call.label << "'";
  return text.str();
}

ProcessGroup::ProcessGroup(int rank, std::vector<int> ranks, std::string name)
    : rank_(rank),
      ranks_(std::move(ranks)),
      name_(std::move(name)),
      log_(std::make_shared<CommLog>(
          static_cast<CommLog::BytesOf>(&wire_bytes))) {
  SB_CHECK(rank >= 0 && rank < size(), "process group '", name_, "': rank ",
           rank, " is not below the size ", size());
}

std::string ProcessGroup::where() const {
  std::ostringstream text;
  text << "over '" << name_ << "' (rank " << rank_ << " of " << size() << ")";
  return text.str();
}

namespace {

CommCall make_call(CommOp op, const Tensor& tensor, std::int64_t numel,
                   const std::string& label) {
  internal::refuse_recording(tensor.device(), comm_op_name(op),
                             "other ranks take part");
  CommCall call;
  call.op = op;
  call.dtype = tensor.dtype();
  call.numel = numel;
  call.label = label;
  return call;
}

// Calls with two buffers on a group of one.
void copy_flat(const Tensor& output, const Tensor& input) {
  // On shapes nothing is copied, but the copy takes virtual time.
  const bool is_in_place = output.is_meta() ? output.shares_storage(input)
                                            : output.raw() == input.raw();
  if (output.numel() == 0 || is_in_place) return;
  const Shape flat{output.numel()};
  output.flat_view(0, flat).copy_from(input.flat_view(0, flat));
}

}  // namespace

// --- Collectives -------------------------------------------------------------

Work ProcessGroup::issue(const CommCall& call, const CommBuffers& buffers) {
  CommRecord record;
  record.op = call.op;
  record.group = name_;
  record.group_size = size();
  record.group_rank = rank_;
  record.dtype = call.dtype;
  record.numel = call.numel;
  if (call.op == CommOp::kSend) record.numel_to_peers = call.numel;
  if (!buffers.send_counts.empty()) {
    record.numel_to_peers =
        call.numel - buffers.send_counts[static_cast<std::size_t>(rank_)];
  }
  record.root_or_peer = call.root_or_peer;
  record.phase = RankContext::current().phase;
  record.label = call.label;
  log_->add(record);
  if (observer_ == nullptr) return dispatch(call, buffers);
  observer_->on_issue(record);
  return Work(std::make_shared<ObservedState>(dispatch(call, buffers),
                                              observer_, std::move(record)));
}

Work ProcessGroup::dispatch(const CommCall& call, const CommBuffers& buffers) {
  const Tensor& any = buffers.output.defined() ? buffers.output : buffers.input;
  if (any.defined() && any.is_meta() && !takes_meta()) return Work();
  switch (call.op) {
    case CommOp::kSend:
      return do_send(any, call);
    case CommOp::kRecv:
      return do_recv(any, call);
    default:
      return do_collective(call, buffers);
  }
}

Work ProcessGroup::all_reduce(const Tensor& tensor, ReduceOp op,
                              const std::string& label) {
  const Arguments arguments(CommOp::kAllReduce, where(), size());
  arguments.defined(tensor, "tensor");
  if (size() == 1) return Work();
  CommCall call = make_call(CommOp::kAllReduce, tensor, tensor.numel(), label);
  call.reduce_op = op;
  return issue(call, {tensor, tensor});
}

Work ProcessGroup::reduce_scatter(const Tensor& output, const Tensor& input,
                                  ReduceOp op, const std::string& label) {
  const Arguments arguments(CommOp::kReduceScatter, where(), size());
  arguments.pair(output, input);
  arguments.pieces(input, "input", output, "output");
  arguments.in_place(input, output, rank_);
  if (size() == 1) {
    copy_flat(output, input);
    return Work();
  }
  CommCall call =
      make_call(CommOp::kReduceScatter, input, input.numel(), label);
  call.reduce_op = op;
  return issue(call, {output, input});
}

Work ProcessGroup::all_gather(const Tensor& output, const Tensor& input,
                              const std::string& label) {
  const Arguments arguments(CommOp::kAllGather, where(), size());
  arguments.pair(output, input);
  arguments.pieces(output, "output", input, "input");
  arguments.in_place(output, input, rank_);
  if (size() == 1) {
    copy_flat(output, input);
    return Work();
  }
  const CommCall call =
      make_call(CommOp::kAllGather, output, output.numel(), label);
  return issue(call, {output, input});
}

Work ProcessGroup::broadcast(const Tensor& tensor, int root,
                             const std::string& label) {
  const Arguments arguments(CommOp::kBroadcast, where(), size());
  arguments.defined(tensor, "tensor");
  arguments.root(root);
  if (size() == 1) return Work();
  CommCall call = make_call(CommOp::kBroadcast, tensor, tensor.numel(), label);
  call.root_or_peer = root;
  return issue(call, {tensor, tensor});
}

Work ProcessGroup::reduce(const Tensor& tensor, int root, ReduceOp op,
                          const std::string& label) {
  const Arguments arguments(CommOp::kReduce, where(), size());
  arguments.defined(tensor, "tensor");
  arguments.root(root);
  if (size() == 1) return Work();
  CommCall call = make_call(CommOp::kReduce, tensor, tensor.numel(), label);
  call.root_or_peer = root;
  call.reduce_op = op;
  return issue(call, {tensor, tensor});
}

Work ProcessGroup::scatter(const Tensor& output, const Tensor& input, int root,
                           const std::string& label) {
  const Arguments arguments(CommOp::kScatter, where(), size());
  arguments.root(root);
  arguments.defined(output, "output");
  if (rank_ == root) {
    arguments.pair(output, input);
    arguments.pieces(input, "input", output, "output");
    arguments.in_place(input, output, rank_);
  }
  if (size() == 1) {
    copy_flat(output, input);
    return Work();
  }
  CommCall call =
      make_call(CommOp::kScatter, output, output.numel() * size(), label);
  call.root_or_peer = root;
  return issue(call, {output, rank_ == root ? input : Tensor()});
}

Work ProcessGroup::gather(const Tensor& output, const Tensor& input, int root,
                          const std::string& label) {
  const Arguments arguments(CommOp::kGather, where(), size());
  arguments.root(root);
  arguments.defined(input, "input");
  if (rank_ == root) {
    arguments.pair(output, input);
    arguments.pieces(output, "output", input, "input");
    arguments.in_place(output, input, rank_);
  }
  if (size() == 1) {
    copy_flat(output, input);
    return Work();
  }
  CommCall call =
      make_call(CommOp::kGather, input, input.numel() * size(), label);
  call.root_or_peer = root;
  return issue(call, {rank_ == root ? output : Tensor(), input});
}

Work ProcessGroup::all_to_all(const Tensor& output, const Tensor& input,
                              const std::string& label) {
  const Arguments arguments(CommOp::kAllToAll, where(), size());
  arguments.pair(output, input);
  SB_CHECK(output.numel() == input.numel(), "all_to_all ", where(),
           ": the output has ", output.numel(), " elements and the input ",
           input.numel(), "; both must have as many");
  SB_CHECK(input.numel() % size() == 0, "all_to_all ", where(), ": ",
           input.numel(), " elements do not divide over ", size(),
           " ranks; pad, or use all_to_all_v");
  arguments.apart(output, input);
  if (size() == 1) {
    copy_flat(output, input);
    return Work();
  }
  const CommCall call =
      make_call(CommOp::kAllToAll, input, input.numel(), label);
  const std::vector<std::int64_t> counts(ranks_.size(), input.numel() / size());
  return issue(call, {output, input, counts, counts});
}

Work ProcessGroup::all_to_all_v(const Tensor& output, const Tensor& input,
                                const std::vector<std::int64_t>& send_counts,
                                const std::vector<std::int64_t>& recv_counts,
                                const std::string& label) {
  const Arguments arguments(CommOp::kAllToAllV, where(), size());
  arguments.pair(output, input);
  arguments.counts(send_counts, input, "send");
  arguments.counts(recv_counts, output, "receive");
  const auto self = static_cast<std::size_t>(rank_);
  SB_CHECK(send_counts[self] == recv_counts[self], "all_to_all_v ", where(),
           ": sends ", send_counts[self], " elements to itself and expects ",
           recv_counts[self]);
  arguments.apart(output, input);
  if (size() == 1) {
    copy_flat(output, input);
    return Work();
  }
  const CommCall call =
      make_call(CommOp::kAllToAllV, input, input.numel(), label);
  return issue(call, {output, input, send_counts, recv_counts});
}

void ProcessGroup::barrier(const std::string& label) {
  if (size() == 1) return;
  CommCall call;
  call.label = label;
  issue(call, {}).wait();
}

Work ProcessGroup::send(const Tensor& tensor, int to, int tag,
                        const std::string& label) {
  const Arguments arguments(CommOp::kSend, where(), size());
  arguments.defined(tensor, "tensor");
  arguments.peer(to, rank_, "receiver");
  CommCall call = make_call(CommOp::kSend, tensor, tensor.numel(), label);
  call.root_or_peer = to;
  call.tag = tag;
  return issue(call, {Tensor(), tensor});
}

Work ProcessGroup::recv(const Tensor& tensor, int from, int tag,
                        const std::string& label) {
  const Arguments arguments(CommOp::kRecv, where(), size());
  arguments.defined(tensor, "tensor");
  arguments.peer(from, rank_, "sender");
  CommCall call = make_call(CommOp::kRecv, tensor, tensor.numel(), label);
  call.root_or_peer = from;
  call.tag = tag;
  return issue(call, {tensor, Tensor()});
}

}  // namespace shardbook
