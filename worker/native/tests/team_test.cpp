// Threads of a team meet after each phase, and each piece of a phase is taken exactly once.
#include "chairlift/team.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "support.hpp"

namespace {

constexpr std::int32_t kPhases = 80;

void test_team(std::int32_t size, std::int32_t pieces, std::int32_t least) {
  chairlift::Team team;
  for (int region = 0; region < 3; ++region) {
    team.reset(kPhases);
    std::vector<int> taken(static_cast<std::size_t>(kPhases * pieces), 0);  // plain: the team keeps threads apart
    const auto work = [&] {
      for (std::int32_t phase = 0; phase < kPhases; ++phase) {
        if (phase % 2 == 0) {
          for (std::int32_t piece; (piece = team.take(phase)) < pieces;) {
            ++taken[static_cast<std::size_t>(phase * pieces + piece)];
          }
        } else {
          for (;;) {
            const auto run = team.take_run(phase, pieces, least, size);
            if (run.first >= run.last) break;
            CHECK(run.last == pieces || (run.last - run.first) % least == 0);
            for (std::int32_t piece = run.first; piece < run.last; ++piece) {
              ++taken[static_cast<std::size_t>(phase * pieces + piece)];
            }
          }
        }
        team.meet(size);
        for (std::int32_t piece = 0; piece < pieces; ++piece) {
          CHECK(taken[static_cast<std::size_t>(phase * pieces + piece)] == 1);
        }
        team.meet(size);
      }
    };
    std::vector<std::thread> threads;
    for (std::int32_t i = 1; i < size; ++i) {
      threads.emplace_back(work);
    }
    work();
    for (auto& thread : threads) {
      thread.join();
    }
  }
}

}  // namespace

int main() {
  for (const std::int32_t size : {1, 2, 3, 5}) {
    test_team(size, 1, 1);
    test_team(size, 17, 2);
    test_team(size, 60, 4);
  }
  return 0;
}
