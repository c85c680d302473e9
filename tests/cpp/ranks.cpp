#include "ranks.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace fccl::test {

std::string DirectoryStore::path(std::string key) const {
  for (char& c : key) c = c == '/' ? '_' : c;
  return directory_ + "/" + key;
}

void DirectoryStore::set(const std::string& key, const std::string& value) {
  const std::string temporary = path(key) + ".part" + std::to_string(::getpid());
  std::ofstream(temporary, std::ios::binary) << value;
  std::filesystem::rename(temporary, path(key));  // readers see the whole value or none
}

std::optional<std::string> DirectoryStore::try_get(const std::string& key) {
  std::ifstream file(path(key), std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TemporaryDirectory::TemporaryDirectory() {
  std::string name = (std::filesystem::temp_directory_path() / "fccl-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = name;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void require(bool condition, const std::string& message) {
  if (!condition) throw std::runtime_error(message);
}

std::vector<RankResult> run_ranks(int world_size, const RankFunction& function, int timeout_seconds,
                                  bool connect, const cpu::GroupTesting& testing) {
  const TemporaryDirectory directory;
  std::vector<pid_t> pids;
  std::vector<int> pipes;
  for (int rank = 0; rank < world_size; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe failed");
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(ends[0]);
      int code = 0;
      try {
        cpu::GroupConfig config;
        config.rank = rank;
        config.world_size = world_size;
        config.name = "test";
        config.testing = testing;
        config.store = std::make_shared<DirectoryStore>(directory.path());
        cpu::Group group(std::move(config));
        if (connect) {
          require(group.connect(Deadline::after(std::chrono::seconds(timeout_seconds))), group.why_not());
        }
        function(group);
      } catch (const std::exception& error) {
        code = 1;
        const std::string text = error.what();
        [[maybe_unused]] const ssize_t written =
            ::write(ends[1], text.data(), std::min<std::size_t>(text.size(), 4000));
      }
      ::_exit(code);
    }
    ::close(ends[1]);
    pids.push_back(pid);
    pipes.push_back(ends[0]);
  }

  std::vector<RankResult> results(static_cast<std::size_t>(world_size));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_seconds);
  int running = world_size;
  std::vector<bool> ended(static_cast<std::size_t>(world_size), false);
  bool killed = false;
  while (running > 0) {
    for (std::size_t i = 0; i < pids.size(); ++i) {
      int status = 0;
      if (ended[i] || ::waitpid(pids[i], &status, WNOHANG) != pids[i]) continue;
      ended[i] = true;
      --running;
      if (WIFEXITED(status)) results[i].exit_code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) results[i].signal = WTERMSIG(status);
      if (killed) results[i].message = "still running after the test's timeout";
    }
    if (running > 0 && !killed && std::chrono::steady_clock::now() > end) {
      killed = true;
      for (std::size_t i = 0; i < pids.size(); ++i) {
        if (!ended[i]) ::kill(pids[i], SIGKILL);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::size_t i = 0; i < pipes.size(); ++i) {
    char buffer[4096];
    const ssize_t got = ::read(pipes[i], buffer, sizeof(buffer));
    if (got > 0) results[i].message.assign(buffer, static_cast<std::size_t>(got));
    ::close(pipes[i]);
  }
  return results;
}

void expect_ranks(int world_size, const RankFunction& function, int timeout_seconds) {
  const std::vector<RankResult> results = run_ranks(world_size, function, timeout_seconds);
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].signal, 0) << "rank " << rank << ": " << results[rank].message;
    EXPECT_EQ(results[rank].exit_code, 0) << "rank " << rank << ": " << results[rank].message;
  }
}

}  // namespace fccl::test
