// check_kernels buckets|pack|collectives [--small] [--seed=N] [--timeout=SECONDS] [--machine-…]
//
// Exit status: 0 all right, 1 something wrong, 2 wrong arguments, 77 there is no such machine. The last line
// says what was found.
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "checks.h"

namespace {

using namespace fccl::gpu_check;

using Check = void (*)(Machine&, const Effort&, Report&);
const std::map<std::string, Check> kChecks = {
    {"buckets", check_buckets}, {"pack", check_pack}, {"collectives", check_collectives}};

int run(const std::vector<std::string>& arguments) {
  const auto check = arguments.empty() ? kChecks.end() : kChecks.find(arguments[0]);
  if (check == kChecks.end()) {
    std::cerr << "usage: check_kernels buckets|pack|collectives [--small] [--seed=N] [--timeout=SECONDS]\n";
    return 2;
  }
  Effort effort;
  std::vector<std::string> of_machine;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument == "--small") {
      effort.small = true;
    } else if (argument.starts_with("--seed=")) {
      effort.seed = std::stoull(value);
    } else if (argument.starts_with("--timeout=")) {
      effort.timeout_s = std::stod(value);
    } else if (argument.starts_with("--machine-")) {
      of_machine.push_back(argument);
    } else {
      std::cerr << "check_kernels: " << argument << " is no option\n";
      return 2;
    }
  }
  std::string why_not;
  const auto machine = make_machine(of_machine, why_not);
  if (machine == nullptr) {
    std::cout << why_not << std::endl;
    return 77;
  }
  Report report;
  check->second(*machine, effort, report);
  std::cout << arguments[0] << ": " << report.cases() - report.wrong() << " of " << report.cases()
            << " cases exact on " << machine->name() << std::endl;
  return report.wrong() == 0 && report.cases() != 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cout << "check_kernels: " << error.what() << std::endl;
    return 1;
  }
}
