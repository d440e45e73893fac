#pragma once

// The threads backend: ranks are threads of one process and read each other's
// buffers where they lie.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/launch.h"
#include "comm/threads/thread_world.h"

namespace shardbook::internal {

/// One rank's end of a group. Calls are published in the shared world; see
/// thread_world.h for what happens to them there.
///
/// Sums add in rank order, the same bits on every rank. A send completes at
/// once when the message has at most 64 KiB, otherwise (and with
/// LaunchOptions::rendezvous_sends always) when the receiver has it. Messages
/// are independent of the group's collectives.
class ThreadGroup : public ProcessGroup {
 public:
  ThreadGroup(std::shared_ptr<ThreadWorld> world, SharedGroup& shared, int rank,
              std::chrono::milliseconds timeout);

  std::vector<std::string> exchange(const std::string& text) override;
  std::vector<std::string> collect(const std::string& text) override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  void abort(const std::string& reason) override;

 protected:
  Work do_collective(const CommCall& call, const CommBuffers& buffers) override;
  Work do_send(const Tensor& tensor, const CommCall& call) override;
  Work do_recv(const Tensor& tensor, const CommCall& call) override;
  std::shared_ptr<ProcessGroup> do_subgroup(const std::vector<int>& members,
                                            const std::string& name) override;

 private:
  Work message(const CommCall& call, const Tensor& input, const Tensor& output);
  std::vector<std::string> texts_of_all(const std::string& text, bool for_all);
  Work work(std::shared_ptr<Operation> operation, Tensors buffers);
  int my_world_rank() const { return world_rank(rank()); }

  std::shared_ptr<ThreadWorld> world_;
  SharedGroup& shared_;
  std::chrono::milliseconds timeout_;
  std::uint64_t next_call_ = 0;
  // How many subgroups of these members this rank has made.
  std::map<std::vector<int>, std::size_t> num_made_;
};

}  // namespace shardbook::internal
