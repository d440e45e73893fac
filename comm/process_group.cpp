#include "comm/process_group.h"

#include <fmt/format.h>

#include "comm/internal/arguments.h"
#include "comm/internal/observer_slot.h"
#include "core/check.h"
#include "core/internal/cuda_device.h"

namespace shardbook {

using internal::Arguments;

std::string call_text(const CommCall& call) {
  const bool is_send = call.op == CommOp::kSend;
  const bool is_message = is_send || call.op == CommOp::kRecv;
  std::string text = comm_op_name(call.op);
  if (call.op != CommOp::kBarrier) {
    text += fmt::format(" {}[{}]", dtype_name(call.dtype), call.numel);
  }
  if (is_message) {
    text +=
        fmt::format(" {} rank {}", is_send ? "to" : "from", call.root_or_peer);
  }
  std::vector<std::string> notes;
  if (call.reduce_op != ReduceOp::kSum) {
    notes.push_back(call.reduce_op == ReduceOp::kMax ? "max" : "min");
  }
  if (!is_message && call.root_or_peer >= 0) {
    notes.push_back(fmt::format("root {}", call.root_or_peer));
  }
  if (call.tag != 0) notes.push_back(fmt::format("tag {}", call.tag));
  if (!notes.empty()) text += fmt::format(" ({})", fmt::join(notes, ", "));
  return call.label.empty() ? text : text + " '" + call.label + "'";
}

std::string signature_of(const CommCall& call) {
  CommCall same = call;
  same.label.clear();
  if (call.op == CommOp::kAllToAllV) same.numel = 0;  // may differ
  return call_text(same);
}

ProcessGroup::ProcessGroup(int rank, std::vector<int> ranks, std::string name)
    : rank_(rank),
      ranks_(std::move(ranks)),
      name_(std::move(name)),
      log_(std::make_shared<CommLog>(
          static_cast<CommLog::BytesOf>(&wire_bytes))),
      observer_(std::make_shared<internal::ObserverSlot>()) {
  SB_CHECK(rank >= 0 && rank < size(), "process group '", name_, "': rank ",
           rank, " is not below the size ", size());
}

void ProcessGroup::set_observer(std::shared_ptr<CommObserver> observer) {
  observer_->set(std::move(observer));
}

std::string ProcessGroup::where() const {
  return fmt::format("over '{}' (rank {} of {})", name_, rank_, size());
}

Arguments ProcessGroup::arguments_of(CommOp op) const {
  return Arguments(op, *this);
}

namespace {

// Calls with two buffers on a group of one.
void copy_flat(const Tensor& output, const Tensor& input) {
  // On shapes nothing is copied, but the copy needs virtual time.
  const bool is_in_place = output.is_meta() ? output.shares_storage(input)
                                            : output.raw() == input.raw();
  if (output.numel() == 0 || is_in_place) return;
  const Shape flat{output.numel()};
  output.flat_view(0, flat).copy_from(input.flat_view(0, flat));
}

}  // namespace

// --- Collectives -------------------------------------------------------------

// A call whose arguments have been checked.
Work ProcessGroup::start(CommCall call, const CommBuffers& buffers) {
  const auto& [output, input, send_counts, recv_counts] = buffers;
  if (size() == 1) {
    copy_flat(output, input);
    return Work();
  }
  const Tensor& any = output.defined() ? output : input;
  internal::refuse_recording(any.device(), comm_op_name(call.op),
                             "other ranks take part");
  call.dtype = any.dtype();
  return issue(call, buffers);
}

Work ProcessGroup::issue(const CommCall& call, const CommBuffers& buffers) {
  CommRecord record{.op = call.op,
                    .group = name_,
                    .group_size = size(),
                    .group_rank = rank_,
                    .dtype = call.dtype,
                    .numel = call.numel,
                    .root_or_peer = call.root_or_peer,
                    .phase = RankContext::current().phase,
                    .label = call.label};
  if (call.op == CommOp::kSend) record.numel_to_peers = call.numel;
  if (!buffers.send_counts.empty()) {
    record.numel_to_peers =
        call.numel - buffers.send_counts[static_cast<std::size_t>(rank_)];
  }
  log_->add(record);
  const std::shared_ptr<CommObserver> observer = observer_->get();
  if (observer == nullptr) return dispatch(call, buffers);
  observer->on_issue(record);
  Work work = dispatch(call, buffers);
  return Work(
      [work, observer, record]() mutable {
        work.wait();
        observer->on_complete(record);
      },
      [work] { return work.done(); });
}

Work ProcessGroup::dispatch(const CommCall& call, const CommBuffers& buffers) {
  const Tensor& any = buffers.output.defined() ? buffers.output : buffers.input;
  if (any.defined() && any.is_meta() && !takes_meta()) return Work();
  if (call.op == CommOp::kSend) return do_send(any, call);
  if (call.op == CommOp::kRecv) return do_recv(any, call);
  return do_collective(call, buffers);
}

Work ProcessGroup::all_reduce(const Tensor& tensor, ReduceOp op,
                              const std::string& label) {
  arguments_of(CommOp::kAllReduce).defined(tensor, "tensor");
  return start({.op = CommOp::kAllReduce,
                .numel = tensor.numel(),
                .reduce_op = op,
                .label = label},
               {tensor, tensor});
}

Work ProcessGroup::reduce_scatter(const Tensor& output, const Tensor& input,
                                  ReduceOp op, const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kReduceScatter);
  arguments.pair(output, input);
  arguments.pieces(input, "input", output, "output");
  arguments.in_place(input, output, rank_);
  return start({.op = CommOp::kReduceScatter,
                .numel = input.numel(),
                .reduce_op = op,
                .label = label},
               {output, input});
}

Work ProcessGroup::all_gather(const Tensor& output, const Tensor& input,
                              const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kAllGather);
  arguments.pair(output, input);
  arguments.pieces(output, "output", input, "input");
  arguments.in_place(output, input, rank_);
  return start(
      {.op = CommOp::kAllGather, .numel = output.numel(), .label = label},
      {output, input});
}

Work ProcessGroup::broadcast(const Tensor& tensor, int root,
                             const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kBroadcast);
  arguments.defined(tensor, "tensor");
  arguments.root(root);
  return start({.op = CommOp::kBroadcast,
                .numel = tensor.numel(),
                .root_or_peer = root,
                .label = label},
               {tensor, tensor});
}

Work ProcessGroup::reduce(const Tensor& tensor, int root, ReduceOp op,
                          const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kReduce);
  arguments.defined(tensor, "tensor");
  arguments.root(root);
  return start({.op = CommOp::kReduce,
                .numel = tensor.numel(),
                .root_or_peer = root,
                .reduce_op = op,
                .label = label},
               {tensor, tensor});
}

Work ProcessGroup::scatter(const Tensor& output, const Tensor& input, int root,
                           const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kScatter);
  arguments.root(root);
  arguments.defined(output, "output");
  if (rank_ == root) {
    arguments.pair(output, input);
    arguments.pieces(input, "input", output, "output");
    arguments.in_place(input, output, rank_);
  }
  return start({.op = CommOp::kScatter,
                .numel = output.numel() * size(),
                .root_or_peer = root,
                .label = label},
               {output, rank_ == root ? input : Tensor()});
}

Work ProcessGroup::gather(const Tensor& output, const Tensor& input, int root,
                          const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kGather);
  arguments.root(root);
  arguments.defined(input, "input");
  if (rank_ == root) {
    arguments.pair(output, input);
    arguments.pieces(output, "output", input, "input");
    arguments.in_place(output, input, rank_);
  }
  return start({.op = CommOp::kGather,
                .numel = input.numel() * size(),
                .root_or_peer = root,
                .label = label},
               {rank_ == root ? output : Tensor(), input});
}

Work ProcessGroup::all_to_all(const Tensor& output, const Tensor& input,
                              const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kAllToAll);
  arguments.pair(output, input);
  SB_CHECK(output.numel() == input.numel(), "all_to_all ", where(),
           ": the output has ", output.numel(), " elements and the input ",
           input.numel(), "; both must have as many");
  SB_CHECK(input.numel() % size() == 0, "all_to_all ", where(), ": ",
           input.numel(), " elements do not divide over ", size(),
           " ranks; pad, or use all_to_all_v");
  arguments.apart(output, input);
  const std::vector<std::int64_t> counts(ranks_.size(), input.numel() / size());
  return start(
      {.op = CommOp::kAllToAll, .numel = input.numel(), .label = label},
      {output, input, counts, counts});
}

Work ProcessGroup::all_to_all_v(const Tensor& output, const Tensor& input,
                                const std::vector<std::int64_t>& send_counts,
                                const std::vector<std::int64_t>& recv_counts,
                                const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kAllToAllV);
  arguments.pair(output, input);
  arguments.counts(send_counts, input, "send");
  arguments.counts(recv_counts, output, "receive");
  const auto self = static_cast<std::size_t>(rank_);
  SB_CHECK(send_counts[self] == recv_counts[self], "all_to_all_v ", where(),
           ": sends ", send_counts[self], " elements to itself and expects ",
           recv_counts[self]);
  arguments.apart(output, input);
  return start(
      {.op = CommOp::kAllToAllV, .numel = input.numel(), .label = label},
      {output, input, send_counts, recv_counts});
}

void ProcessGroup::barrier(const std::string& label) {
  if (size() > 1) issue({.label = label}, {}).wait();
}

Work ProcessGroup::send(const Tensor& tensor, int to, int tag,
                        const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kSend);
  arguments.defined(tensor, "tensor");
  arguments.peer(to, rank_, "receiver");
  return start({.op = CommOp::kSend,
                .numel = tensor.numel(),
                .root_or_peer = to,
                .tag = tag,
                .label = label},
               {Tensor(), tensor});
}

Work ProcessGroup::recv(const Tensor& tensor, int from, int tag,
                        const std::string& label) {
  const Arguments arguments = arguments_of(CommOp::kRecv);
  arguments.defined(tensor, "tensor");
  arguments.peer(from, rank_, "sender");
  return start({.op = CommOp::kRecv,
                .numel = tensor.numel(),
                .root_or_peer = from,
                .tag = tag,
                .label = label},
               {tensor, Tensor()});
}

}  // namespace shardbook
