// Runs a function on several ranks, each a forked process with a Group of its own.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/group.h"

namespace fccl::test {

// A KeyValueStore in a directory that all forked ranks see.
class DirectoryStore : public cpu::KeyValueStore {
 public:
  explicit DirectoryStore(std::string directory) : directory_(std::move(directory)) {}
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;

 private:
  std::string path(std::string key) const;
  std::string directory_;
};

// A new directory under the system's temporary one, removed with its contents by the destructor.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct RankResult {
  int exit_code = -1;   // 0: the function returned; 1: it threw
  int signal = 0;       // the signal that ended it, if one did
  std::string message;  // what it threw
};

using RankFunction = std::function<void(cpu::Group& group)>;

// Forks `world_size` ranks; each makes a group, connects unless `connect` is false, and runs `function`.
// All are killed after `timeout_seconds`.
std::vector<RankResult> run_ranks(int world_size, const RankFunction& function, int timeout_seconds = 60,
                                  bool connect = true, const cpu::GroupTesting& testing = {});

// As run_ranks; every rank must return. Adds a test failure for each that does not.
void expect_ranks(int world_size, const RankFunction& function, int timeout_seconds = 60);

// Throws std::runtime_error; what a rank's function uses instead of EXPECT_*, which would be lost
// with the process.
void require(bool condition, const std::string& message);

}  // namespace fccl::test
