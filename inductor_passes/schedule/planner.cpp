// The planner's inner loops, compiled: `replay_time`, `live_bytes`, `list_schedule`, `local_search`, `placing`,
// `least_memory`, `implied` and `robust.makespans` of this folder.
//
// Each function gives exactly what its Python namesake gives, ties included; tests hold both against each other. The
// Python files explain the algorithms, this one does not repeat them. All numbers are signed 64-bit; the caller has
// made sure that sums fit.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

using i64 = int64_t;
using Mask = unsigned __int128;
using std::vector;

namespace {

constexpr i64 COMPUTE = 0, START = 1;
constexpr i64 FOREVER = i64(1) << 62;
constexpr int TRIES = 6;

}  // namespace

extern "C" {
// Flat view of a problem, see `tables.Tables`; lists of lists are (offsets, values).
struct Tables {
    i64 n, machines, storages, live0;
    const i64 *kind, *busy, *lane, *machine, *start, *alloc, *transient, *size;
    const i64 *pred_at, *preds, *succ_at, *succs, *eats_at, *eats, *reader_at, *readers;
    const i64 *slowdown;
};
}

namespace {

struct Trace {
    i64 makespan = 0;
    i64 *begin, *end, *lane_begin, *lane_end, *exposed;
};

bool all_tasks(const Tables &t, const i64 *numbers, i64 count) {
    return std::all_of(numbers, numbers + count, [&t](i64 i) { return 0 <= i && i < t.n; });
}

// The transfers of each machine that have not ended, the earliest first. See `simulate._Transfers`.
struct Transfers {
    struct One {
        i64 begin, end, percent;
    };
    vector<vector<One>> of;
    vector<size_t> first;
    explicit Transfers(i64 machines) : of(machines), first(machines, 0) {}

    i64 end_of_work(i64 now, i64 work) {
        while (work > 0) {
            i64 percent = 0, until = FOREVER;
            for (size_t m = 0; m < of.size(); m++) {
                while (first[m] < of[m].size() && of[m][first[m]].end <= now) first[m]++;
                if (first[m] == of[m].size()) continue;
                const One &one = of[m][first[m]];
                if (one.begin <= now) percent = std::max(percent, one.percent);
                until = std::min(until, one.begin <= now ? one.end : one.begin);
            }
            i64 needed = (work * (100 + percent) + 99) / 100;
            if (until == FOREVER || needed <= until - now) return now + needed;
            work -= (until - now) * 100 / (100 + percent);
            now = until;
        }
        return now;
    }
};

// 0, or 1 + the number of a wait that comes before its start. `contended`: transfers slow kernels down.
template <bool contended = false>
i64 replay(const Tables &t, const i64 *order, Trace &out) {
    Transfers transfers(contended ? t.machines : 0);
    std::fill(out.begin, out.begin + t.n, 0);
    std::fill(out.end, out.end + t.n, 0);
    std::fill(out.lane_begin, out.lane_begin + t.n, -1);
    std::fill(out.lane_end, out.lane_end + t.n, -1);
    std::fill(out.exposed, out.exposed + t.n, 0);
    vector<i64> free(t.machines, 0);
    i64 now = 0, last = -1;
    for (i64 k = 0; k < t.n; k++) {
        i64 i = order[k];
        out.begin[i] = now;
        if (t.kind[i] == COMPUTE) {
            now = contended ? transfers.end_of_work(now, t.busy[i]) : now + t.busy[i];
        } else if (t.kind[i] == START) {
            now += t.busy[i];
            i64 m = t.machine[i];
            i64 b = std::max(free[m], now);
            out.lane_begin[i] = b;
            free[m] = out.lane_end[i] = b + t.lane[i];
            if (contended) transfers.of[m].push_back({b, out.lane_end[i], t.slowdown[i]});
            if (last < 0 || out.lane_end[i] >= out.lane_end[last]) last = i;
        } else {
            i64 s = t.start[i], done = out.lane_end[s];
            if (done < 0) return i + 1;
            if (done > now) {
                out.exposed[s] += done - now;
                now = done;
            }
            now += t.busy[i];
        }
        out.end[i] = now;
    }
    out.makespan = now;
    if (last >= 0 && out.lane_end[last] > now) {
        out.makespan = out.lane_end[last];
        out.exposed[last] += out.makespan - now;
    }
    return 0;
}

struct OwnedTrace : Trace {
    vector<i64> memory;
    explicit OwnedTrace(const Tables &t) : memory(5 * t.n + 1) {
        begin = memory.data();
        end = begin + t.n;
        lane_begin = end + t.n;
        lane_end = lane_begin + t.n;
        exposed = lane_end + t.n;
    }
};

vector<i64> unread_counts(const Tables &t) {
    vector<i64> unread(t.storages);
    for (i64 s = 0; s < t.storages; s++) unread[s] = t.reader_at[s + 1] - t.reader_at[s];
    return unread;
}

void live_bytes(const Tables &t, const i64 *order, i64 *out) {
    vector<i64> unread = unread_counts(t);
    i64 live = t.live0;
    for (i64 k = 0; k < t.n; k++) {
        i64 i = order[k];
        live += t.alloc[i];
        out[k] = live;
        live -= t.transient[i];
        for (i64 e = t.eats_at[i]; e < t.eats_at[i + 1]; e++)
            if (!--unread[t.eats[e]]) live -= t.size[t.eats[e]];
    }
}

// -- memory.RangeMax and memory.Continuation ------------------------------------------------------------------------

class RangeMax {
  public:
    explicit RangeMax(const vector<i64> &values) {
        while (size_ < i64(values.size()) + 2) size_ *= 2;
        add_.assign(2 * size_, 0);
        max_.assign(2 * size_, 0);
        std::copy(values.begin(), values.end(), max_.begin() + size_ + 1);
        for (i64 p = size_ - 1; p > 0; p--) max_[p] = std::max(max_[2 * p], max_[2 * p + 1]);
    }

    void add(i64 first, i64 stop, i64 value) {
        if (first >= stop || !value) return;
        i64 left = first + size_, right = stop + 1 + size_;
        while ((left ^ right) != 1) {
            if (!(left & 1)) max_[left + 1] += value, add_[left + 1] += value;
            if (right & 1) max_[right - 1] += value, add_[right - 1] += value;
            left >>= 1, right >>= 1;
            max_[left] = std::max(max_[2 * left], max_[2 * left + 1]) + add_[left];
            max_[right] = std::max(max_[2 * right], max_[2 * right + 1]) + add_[right];
        }
        for (left >>= 1; left; left >>= 1) {
            i64 a = std::max(max_[2 * left], max_[2 * left + 1]) + add_[left];
            if (max_[left] == a) return;
            max_[left] = a;
        }
    }

    bool at_most(i64 first, i64 stop, i64 limit) const {
        return max_[1] <= limit || first >= stop || max(first, stop) <= limit;
    }

  private:
    i64 max(i64 first, i64 stop) const {
        i64 left = first + 1 + size_, right = stop + size_;
        i64 a = max_[left], b = max_[right];
        while (left >> 1 != right >> 1) {
            if (!(left & 1)) a = std::max(a, max_[left + 1]);
            if (right & 1) b = std::max(b, max_[right - 1]);
            left >>= 1, right >>= 1;
            a += add_[left];
            b += add_[right];
        }
        a = std::max(a, b);
        for (left >>= 1; left; left >>= 1) a += add_[left];
        return a;
    }

    i64 size_ = 1;
    vector<i64> add_, max_;
};

vector<i64> profile(const Tables &t, const i64 *order) {
    vector<i64> found(t.n);
    live_bytes(t, order, found.data());
    return found;
}

class Continuation {
  public:
    Continuation(const Tables &t, const i64 *reference, i64 cap)
        : t_(t), cap_(cap), order_(reference), tree_(profile(t, reference)), position_(t.n), ran_(t.n, 0),
          readers_(t.readers, t.readers + t.reader_at[t.storages]), last_(t.storages), unread_(unread_counts(t)),
          live_(t.live0) {
        for (i64 k = 0; k < t.n; k++) position_[reference[k]] = k;
        for (i64 s = 0; s < t.storages; s++) {
            std::sort(readers_.begin() + t.reader_at[s], readers_.begin() + t.reader_at[s + 1],
                      [this](i64 a, i64 b) { return position_[a] < position_[b]; });
            last_[s] = t.reader_at[s + 1] - 1;
        }
    }

    i64 upcoming() const { return order_[next_]; }

    bool admits(i64 i) {
        i64 alloc = t_.alloc[i];
        if (!alloc) return true;
        i64 at = position_[i];
        if (at == next_) return true;
        if (live_ + alloc > cap_) return false;
        i64 held = alloc - t_.transient[i];
        if (!held) return true;
        if (tree_.at_most(next_, at, cap_ - held)) return true;
        const auto &released = releases(i, at);
        if (released.empty()) return false;
        for (auto [first, size] : released) tree_.add(first, at + 1, -size);
        bool fits = tree_.at_most(next_, at, cap_ - held);
        for (auto [first, size] : released) tree_.add(first, at + 1, size);
        return fits;
    }

    void run(i64 i) {
        i64 at = position_[i];
        if (at != next_) {
            for (auto [first, size] : releases(i, at)) tree_.add(first, at + 1, -size);
            tree_.add(next_, at, t_.alloc[i] - t_.transient[i]);
            if (t_.transient[i]) tree_.add(at, at + 1, -t_.transient[i]);
        }
        ran_[i] = 1;
        live_ += t_.alloc[i] - t_.transient[i];
        for (i64 e = t_.eats_at[i]; e < t_.eats_at[i + 1]; e++)
            if (!--unread_[t_.eats[e]]) live_ -= t_.size[t_.eats[e]];
        while (next_ < t_.n && ran_[order_[next_]]) next_++;
    }

  private:
    const vector<std::pair<i64, i64>> &releases(i64 i, i64 at) {
        found_.clear();
        (void)at;
        for (i64 e = t_.eats_at[i]; e < t_.eats_at[i + 1]; e++) {
            i64 s = t_.eats[e], begin = t_.reader_at[s];
            while (ran_[readers_[last_[s]]]) last_[s]--;
            if (readers_[last_[s]] != i) continue;
            i64 k = last_[s] - 1;
            while (k >= begin && ran_[readers_[k]]) k--;
            found_.emplace_back(k >= begin ? position_[readers_[k]] + 1 : next_, t_.size[s]);
        }
        return found_;
    }

    const Tables &t_;
    i64 cap_;
    const i64 *order_;
    RangeMax tree_;
    vector<i64> position_;
    vector<char> ran_;
    vector<i64> readers_, last_, unread_;
    i64 live_, next_ = 0;
    vector<std::pair<i64, i64>> found_;
};

// -- slack.latest_issue and slack.as_progress, reference.lazy -------------------------------------------------------

void latest_issue(const Tables &t, const i64 *order, const Trace &trace, const i64 *wait_by, i64 *latest) {
    std::fill(latest, latest + t.n, trace.makespan);
    vector<i64> next_begin(t.machines, trace.makespan);
    for (i64 k = t.n - 1; k >= 0; k--) {
        i64 i = order[k];
        if (t.kind[i] == COMPUTE) {
            latest[i] = trace.begin[i];
            continue;
        }
        i64 need = trace.makespan;
        for (i64 e = t.succ_at[i]; e < t.succ_at[i + 1]; e++) need = std::min(need, latest[t.succs[e]]);
        if (wait_by && t.kind[i] != START) need = std::min(need, wait_by[i]);
        if (t.kind[i] == START) {
            i64 m = t.machine[i];
            need = std::max(std::min(need, next_begin[m]) - t.lane[i], trace.lane_begin[i]);
            next_begin[m] = need;
        }
        latest[i] = need - (t.kind[i] == START || !wait_by ? t.busy[i] : 0);
    }
}

void as_progress(const Tables &t, const i64 *order, const i64 *begin, const i64 *times, i64 *out) {
    vector<i64> begins, progress;
    i64 done = 0;
    for (i64 k = 0; k < t.n; k++) {
        i64 i = order[k];
        if (t.kind[i] == COMPUTE && t.busy[i]) begins.push_back(begin[i]), progress.push_back(done);
        done += t.busy[i];
    }
    progress.push_back(done);
    for (i64 i = 0; i < t.n; i++) {
        i64 k = std::upper_bound(begins.begin(), begins.end(), times[i]) - begins.begin() - 1;
        out[i] = k >= 0 ? std::min(progress[k] + times[i] - begins[k], progress[k + 1]) : 0;
    }
}

// Places tasks behind all that they need, which is given by task; each once.
class Placing {
  public:
    Placing(const i64 *need_at, const i64 *needs, i64 n, i64 *out)
        : need_at_(need_at), needs_(needs), placed_(n, 0), out_(out) {}

    void place(i64 root) {
        stack_.assign(1, root);
        while (!stack_.empty()) {
            i64 i = stack_.back();
            if (placed_[i]) {
                stack_.pop_back();
                continue;
            }
            size_t before = stack_.size();
            for (i64 e = need_at_[i + 1] - 1; e >= need_at_[i]; e--)
                if (!placed_[needs_[e]]) stack_.push_back(needs_[e]);
            if (stack_.size() > before) continue;
            placed_[i] = 1;
            out_[count_++] = i;
            stack_.pop_back();
        }
    }

  private:
    const i64 *need_at_, *needs_;
    vector<char> placed_;
    vector<i64> stack_;
    i64 count_ = 0, *out_;
};

void lazy(const Tables &t, const i64 *order, bool hold_waits, i64 *out) {
    vector<char> waited(t.n, 0);
    for (i64 i = 0; i < t.n; i++)
        if (t.kind[i] > START) waited[t.start[i]] = 1;
    Placing placing(t.pred_at, t.preds, t.n, out);
    for (i64 k = 0; k < t.n; k++) {
        i64 i = order[k];
        bool unread = t.succ_at[i] == t.succ_at[i + 1];
        if (t.kind[i] == COMPUTE || (t.kind[i] == START ? !waited[i] : hold_waits || unread)) placing.place(i);
    }
    for (i64 k = 0; k < t.n; k++) placing.place(order[k]);
}

// -- placing.waits_down, placing.starts_up, robust.makespans --------------------------------------------------------

constexpr i64 STAYS = -1;

// `order` with every task whose anchor is not STAYS right before the task now at that position.
void insert(const Tables &t, const i64 *order, const vector<i64> &anchor, i64 *out) {
    vector<i64> first(t.n + 1, STAYS), last(t.n + 1, STAYS), next(t.n, STAYS);
    for (i64 k = 0; k < t.n; k++) {
        i64 i = order[k], at = anchor[i];
        if (at == STAYS) continue;
        (first[at] == STAYS ? first[at] : next[last[at]]) = i;
        last[at] = i;
    }
    i64 count = 0;
    for (i64 k = 0; k <= t.n; k++) {
        for (i64 i = first[k]; i != STAYS; i = next[i]) out[count++] = i;
        if (k < t.n && anchor[order[k]] == STAYS) out[count++] = order[k];
    }
}

vector<i64> positions(const Tables &t, const i64 *order) {
    vector<i64> position(t.n);
    for (i64 k = 0; k < t.n; k++) position[order[k]] = k;
    return position;
}

void waits_down(const Tables &t, const i64 *order, i64 limit, i64 *out) {
    vector<i64> position = positions(t, order), last_reader(t.storages, -1), anchor(t.n, STAYS), held;
    RangeMax tree(profile(t, order));
    for (i64 s = 0; s < t.storages; s++)
        for (i64 r = t.reader_at[s]; r < t.reader_at[s + 1]; r++)
            last_reader[s] = std::max(last_reader[s], position[t.readers[r]]);
    for (i64 k = t.n - 1; k >= 0; k--) {
        i64 i = order[k];
        if (t.kind[i] <= START || t.alloc[i]) continue;
        i64 place = t.n;
        for (i64 e = t.succ_at[i]; e < t.succ_at[i + 1]; e++) {
            i64 j = t.succs[e];
            place = std::min(place, anchor[j] == STAYS ? position[j] : anchor[j]);
        }
        if (place <= k + 1) continue;
        held.clear();
        i64 size = 0, first = FOREVER;
        for (i64 e = t.eats_at[i]; e < t.eats_at[i + 1]; e++) {
            i64 s = t.eats[e];
            if (last_reader[s] >= place) continue;
            held.push_back(s);
            size += t.size[s];
            first = std::min(first, last_reader[s]);
        }
        if (held.empty()) first = k;
        if (size && !tree.at_most(first + 1, place, limit - size)) continue;
        for (i64 s : held) {
            tree.add(last_reader[s] + 1, place, t.size[s]);
            last_reader[s] = place;
        }
        anchor[i] = place;
    }
    insert(t, order, anchor, out);
}

// 0, or 1 + the number of a wait that comes before its start.
i64 starts_up(const Tables &t, const i64 *order, i64 limit, i64 ahead, i64 *out) {
    OwnedTrace trace(t);
    if (i64 wrong = replay(t, order, trace)) return wrong;
    vector<i64> position = positions(t, order), begins(t.n), before(t.machines, 0), free(t.machines, 0);
    vector<i64> anchor(t.n, STAYS);
    RangeMax tree(profile(t, order));
    for (i64 k = 0; k < t.n; k++) begins[k] = trace.begin[order[k]];
    for (i64 k = 0; k < t.n; k++) {
        i64 i = order[k];
        if (t.kind[i] != START) continue;
        i64 m = t.machine[i], due = free[m] - t.busy[i] - ahead;
        i64 place = std::upper_bound(begins.begin(), begins.begin() + k, due) - begins.begin() - 1;
        place = std::max(place, before[m]);
        for (i64 e = t.pred_at[i]; e < t.pred_at[i + 1]; e++) {
            i64 p = t.preds[e];
            place = std::max(place, anchor[p] == STAYS ? position[p] + 1 : anchor[p]);
        }
        while (place < k && !tree.at_most(place, k, limit - t.alloc[i]))
            place += std::max<i64>(1, (k - place + 1) / 2);
        if (place < k) {
            tree.add(place, k, t.alloc[i] - t.transient[i]);
            anchor[i] = place;
        }
        before[m] = anchor[i] == STAYS ? k + 1 : anchor[i];
        free[m] = trace.lane_end[i];
    }
    insert(t, order, anchor, out);
    return 0;
}

// The makespan of `order` under each of `count` other sets of durations; for a legal order.
void makespans(const Tables &t, const i64 *order, i64 count, const i64 *busy, const i64 *lane, bool contended,
               i64 *out) {
    OwnedTrace trace(t);
    Tables other = t;
    for (i64 c = 0; c < count; c++) {
        other.busy = busy + c * t.n;
        other.lane = lane + c * t.n;
        contended ? replay<true>(other, order, trace) : replay(other, order, trace);
        out[c] = trace.makespan;
    }
}

// -- guarded.just_in_time, least_memory.greedy, reference.on_demand -------------------------------------------------

// 0, or 1 + the number of a wait that comes before its start.
i64 just_in_time(const Tables &t, const i64 *order, const i64 *early, i64 margin, bool relief, i64 *position,
                 i64 *latest, i64 *release) {
    OwnedTrace trace(t);
    if (i64 wrong = replay(t, order, trace)) return wrong;
    for (i64 k = 0; k < t.n; k++) position[order[k]] = k;
    latest_issue(t, order, trace, nullptr, latest);
    vector<i64> due(t.n);
    for (i64 i = 0; i < t.n; i++) due[i] = latest[i] - margin * t.lane[i];
    as_progress(t, order, trace.begin, due.data(), release);
    for (i64 i = 0; i < t.n; i++) {
        if (!early[i]) continue;
        release[i] = 0;
        if (relief) latest[i] = position[i] - t.n;
    }
    return 0;
}

void greedy(const Tables &t, i64 looked_at, i64 *out) {
    using Small = std::pair<i64, i64>;
    using Large = std::tuple<i64, i64, i64>;
    vector<i64> unread = unread_counts(t), missing(t.n);
    vector<char> done(t.n, 0);
    auto growth = [&](i64 i) {
        i64 freed = t.transient[i];
        for (i64 e = t.eats_at[i]; e < t.eats_at[i + 1]; e++)
            if (unread[t.eats[e]] == 1) freed += t.size[t.eats[e]];
        return t.alloc[i] - freed;
    };
    std::priority_queue<Small, vector<Small>, std::greater<Small>> by_growth;
    std::priority_queue<Large, vector<Large>, std::greater<Large>> by_size;
    auto ready = [&](i64 i) {
        by_growth.emplace(growth(i), i);
        by_size.emplace(t.alloc[i], growth(i), i);
    };
    for (i64 i = 0; i < t.n; i++) {
        missing[i] = t.pred_at[i + 1] - t.pred_at[i];
        if (!missing[i]) ready(i);
    }
    i64 live = t.live0, most = t.live0;
    vector<Small> passed;
    for (i64 count = 0; count < t.n; count++) {
        passed.clear();
        i64 found = -1;
        while (!by_growth.empty() && found < 0 && i64(passed.size()) < looked_at) {
            Small entry = by_growth.top();
            by_growth.pop();
            if (done[entry.second]) continue;
            if (live + t.alloc[entry.second] <= most)
                found = entry.second;
            else
                passed.push_back(entry);
        }
        for (const Small &entry : passed) by_growth.push(entry);
        while (found < 0) {
            found = std::get<2>(by_size.top());
            by_size.pop();
            if (done[found]) found = -1;
        }
        i64 i = found;
        done[i] = 1;
        out[count] = i;
        most = std::max(most, live + t.alloc[i]);
        live += growth(i);
        for (i64 e = t.eats_at[i]; e < t.eats_at[i + 1]; e++) {
            i64 s = t.eats[e];
            if (--unread[s] != 1) continue;
            i64 r = t.reader_at[s];
            while (done[t.readers[r]]) r++;
            if (!missing[t.readers[r]]) by_growth.emplace(growth(t.readers[r]), t.readers[r]);
        }
        for (i64 e = t.succ_at[i]; e < t.succ_at[i + 1]; e++)
            if (!--missing[t.succs[e]]) ready(t.succs[e]);
    }
}

void on_demand(const Tables &t, const i64 *roots, i64 count, const i64 *need_at, const i64 *needs, i64 *out) {
    Placing placing(need_at, needs, t.n, out);
    for (i64 k = 0; k < count; k++) placing.place(roots[k]);
}

// -- implied --------------------------------------------------------------------------------------------------------

class Tight {
  public:
    explicit Tight(const vector<i64> &room) : room_(room) {
        vector<i64> nearest, open;
        for (i64 k = 0; k < i64(room.size()); k++) {
            while (!open.empty() && room[open.back()] >= room[k]) open.pop_back();
            nearest.push_back(open.empty() ? -1 : open.back());
            open.push_back(k);
        }
        earlier_.push_back(nearest);
        while (*std::max_element(earlier_.back().begin(), earlier_.back().end()) >= 0) {
            const vector<i64> &step = earlier_.back();
            vector<i64> next(step.size());
            for (size_t k = 0; k < step.size(); k++) next[k] = step[k] >= 0 ? step[step[k]] : -1;
            earlier_.push_back(std::move(next));
        }
    }

    i64 at_or_before(i64 k, i64 size) const {
        if (k < 0 || room_[k] < size) return std::max<i64>(k, -1);
        for (auto step = earlier_.rbegin(); step != earlier_.rend(); ++step)
            if ((*step)[k] >= 0 && room_[(*step)[k]] >= size) k = (*step)[k];
        return earlier_[0][k];
    }

  private:
    const vector<i64> &room_;
    vector<vector<i64>> earlier_;
};

class Implied {
  public:
    Implied(const Tables &t, const i64 *producer, const i64 *releasable, i64 cap)
        : order(t.n), t_(t), producer_(producer), releasable_(releasable), cap_(cap), position_(t.n), preds_(t.n),
          succs_(t.n), produces_(t.n) {
        for (i64 i = 0; i < t.n; i++) {
            order[i] = position_[i] = i;
            preds_[i].assign(t.preds + t.pred_at[i], t.preds + t.pred_at[i + 1]);
            succs_[i].assign(t.succs + t.succ_at[i], t.succs + t.succ_at[i + 1]);
        }
        for (i64 s = 0; s < t.storages; s++)
            if (producer[s] >= 0) produces_[producer[s]].push_back(s);
    }

    // False: no order holds to the cap.
    bool run(i64 chains) {
        for (i64 share : {(chains + 1) / 2, chains / 2}) {
            size_t known = added.size();
            vector<i64> weight(t_.n);
            for (i64 i = 0; i < t_.n; i++) weight[i] = 1 + t_.busy[i] + t_.lane[i];
            for (i64 c = 0; c < share; c++) {
                longest(weight);
                if (std::none_of(tasks_.begin(), tasks_.end(), [&](i64 i) { return weight[i] != 0; })) break;
                for (i64 i : tasks_) weight[i] = 0;
                place();
                if (*std::min_element(room_.begin(), room_.end()) < 0) return false;
                not_before();
                not_after();
                if (!settle()) return false;
            }
            if (added.size() == known) break;
        }
        return true;
    }

    vector<i64> order;
    vector<std::pair<i64, i64>> added;

  private:
    using Way = std::pair<i64, i64>;  // place, bytes
    static constexpr size_t WAYS = 3;

    void add(i64 before, i64 after) {
        preds_[after].push_back(before);
        succs_[before].push_back(after);
        added.emplace_back(before, after);
        if (position_[before] > position_[after]) stale_ = true;
    }

    bool settle() {
        if (!stale_) return true;
        vector<i64> missing(t_.n), found;
        std::priority_queue<i64, vector<i64>, std::greater<i64>> ready;
        for (i64 i = 0; i < t_.n; i++) {
            missing[i] = i64(preds_[i].size());
            if (!missing[i]) ready.push(i);
        }
        while (!ready.empty()) {
            i64 i = ready.top();
            ready.pop();
            found.push_back(i);
            for (i64 j : succs_[i])
                if (!--missing[j]) ready.push(j);
        }
        if (i64(found.size()) < t_.n) return false;
        for (i64 k = 0; k < t_.n; k++) position_[found[k]] = k;
        order = std::move(found);
        stale_ = false;
        return true;
    }

    void longest(const vector<i64> &weight) {
        vector<i64> best(t_.n, 0), came(t_.n, -1);
        for (i64 i : order) {
            i64 most = 0, from = -1;
            for (i64 p : preds_[i])
                if (best[p] > most) most = best[p], from = p;
            best[i] = most + weight[i], came[i] = from;
        }
        tasks_.clear();
        for (i64 i = std::max_element(best.begin(), best.end()) - best.begin(); i >= 0; i = came[i])
            tasks_.push_back(i);
        std::reverse(tasks_.begin(), tasks_.end());
    }

    void place() {
        const i64 end = i64(tasks_.size());
        place_.assign(t_.n, -1);
        for (i64 k = 0; k < end; k++) place_[tasks_[k]] = k;
        after_.assign(t_.n, -1);
        before_.assign(t_.n, end);
        for (i64 i : order) {
            i64 k = place_[i];
            if (k < 0)
                for (i64 p : preds_[i]) k = std::max(k, after_[p]);
            after_[i] = k;
        }
        for (auto at = order.rbegin(); at != order.rend(); ++at) {
            i64 k = place_[*at];
            if (k < 0) {
                k = end;
                for (i64 j : succs_[*at]) k = std::min(k, before_[j]);
            }
            before_[*at] = k;
        }
        last_.assign(t_.storages, end - 1);
        vector<i64> change(end + 1, 0);
        for (i64 s = 0; s < t_.storages; s++) {
            if (releasable_[s]) {
                last_[s] = -1;
                for (i64 r = t_.reader_at[s]; r < t_.reader_at[s + 1]; r++)
                    last_[s] = std::max(last_[s], after_[t_.readers[r]]);
            }
            i64 p = producer_[s], until = last_[s];
            if (p < 0) {
                if (releasable_[s]) change[until + 1] -= t_.size[s];
            } else if (before_[p] <= until) {
                change[before_[p]] += t_.size[s];
                change[until + 1] -= t_.size[s];
            }
        }
        room_.resize(end);
        i64 live = t_.live0;
        for (i64 k = 0; k < end; k++) {
            live += change[k];
            room_[k] = cap_ - live - t_.transient[tasks_[k]];
        }
    }

    // Of sorted ways, the widest first, those that hold more than all wider ones.
    static vector<Way> best(const vector<Way> &ways) {
        vector<Way> kept;
        for (const Way &way : ways)
            if (kept.empty() || way.second > kept.back().second) kept.push_back(way);
        if (kept.size() > WAYS) kept.resize(WAYS);
        return kept;
    }

    void not_before() {
        Tight tight(room_);
        vector<vector<Way>> leaves(t_.n);
        vector<Way> ways;
        for (auto at = order.rbegin(); at != order.rend(); ++at) {
            i64 i = *at;
            if (place_[i] >= 0) continue;
            ways.clear();
            for (i64 s : produces_[i]) {
                i64 size = t_.size[s];
                if (last_[s] > after_[i]) ways.emplace_back(last_[s], size);
                if (!releasable_[s]) continue;
                for (i64 r = t_.reader_at[s]; r < t_.reader_at[s + 1]; r++)
                    for (auto [k, held] : leaves[t_.readers[r]])
                        if (k > last_[s]) ways.emplace_back(k, std::min(held, size));
            }
            if (ways.empty()) continue;
            std::sort(ways.begin(), ways.end(), std::greater<Way>());
            leaves[i] = best(ways);
            for (auto [k, held] : leaves[i]) {
                i64 found = tight.at_or_before(std::min(k, before_[i] - 1), held);
                if (found > after_[i]) {
                    add(tasks_[found], i);
                    after_[i] = found;
                }
            }
        }
    }

    void not_after() {
        const i64 end = i64(room_.size());
        vector<i64> turned(room_.rbegin(), room_.rend());
        Tight tight(turned);
        vector<vector<Way>> keeps(t_.n);
        vector<Way> ways;
        for (i64 i : order) {
            if (place_[i] >= 0) continue;
            ways.clear();
            auto held_from = [&](i64 k, i64 held) {
                if (k < before_[i]) ways.emplace_back(k, held);
            };
            for (i64 e = t_.eats_at[i]; e < t_.eats_at[i + 1]; e++) {
                i64 s = t_.eats[e], p = producer_[s], size = t_.size[s], free = last_[s] + 1;
                if (p < 0) {
                    held_from(free, size);
                    continue;
                }
                held_from(std::max(before_[p], free), size);
                for (auto [k, held] : keeps[p]) held_from(std::max(k, free), std::min(held, size));
            }
            if (ways.empty()) continue;
            std::sort(ways.begin(), ways.end(), [](const Way &a, const Way &b) {
                return a.first != b.first ? a.first < b.first : a.second > b.second;
            });
            keeps[i] = best(ways);
            for (auto [k, held] : keeps[i]) {
                i64 found = end - 1 - tight.at_or_before(end - 1 - std::max(k, after_[i] + 1), held);
                if (found < before_[i]) {
                    add(i, tasks_[found]);
                    before_[i] = found;
                }
            }
        }
    }

    const Tables &t_;
    const i64 *producer_, *releasable_;
    i64 cap_;
    bool stale_ = false;
    vector<i64> position_;
    vector<vector<i64>> preds_, succs_, produces_;
    vector<i64> tasks_, place_, after_, before_, last_, room_;
};

// -- list_schedule --------------------------------------------------------------------------------------------------

struct Rule {
    const i64 *compute, *collective, *release;
    bool eager, strict, fill;
};

using Entry = std::pair<i64, i64>;
using Heap = std::priority_queue<Entry, vector<Entry>, std::greater<Entry>>;

class Builder {
  public:
    Builder(const Tables &t, const Rule &rule, Continuation *memory)
        : t_(t), rule_(rule), memory_(memory), free_(t.machines, 0), lane_end_(t.n, 0), missing_(t.n),
          starts_(t.machines), ran_(t.n, 0) {
        order.reserve(t.n);
        if (rule.strict) {
            for (i64 i = 0; i < t.n; i++)
                if (t.kind[i] == COMPUTE) sequence_.push_back(i);
            std::stable_sort(sequence_.begin(), sequence_.end(),
                             [&rule](i64 a, i64 b) { return rule.compute[a] < rule.compute[b]; });
        }
        for (i64 i = 0; i < t.n; i++) missing_[i] = t.pred_at[i + 1] - t.pred_at[i];
        for (i64 i = 0; i < t.n; i++)
            if (!missing_[i]) ready(i);
    }

    void begin(i64 i) {
        if (t_.kind[i] > START) now_ = std::max(now_, lane_end_[t_.start[i]]);
        run(i);
    }

    bool build() {
        while (i64(order.size()) < t_.n) {
            if (!waits_.empty() && waits_.top().first <= now_) {
                run_wait();
                continue;
            }
            i64 compute = next_compute();
            if (compute >= 0) {
                if (t_.busy[compute]) {
                    i64 before = now_;
                    feed(now_ + t_.busy[compute], t_.busy[compute]);
                    if (now_ != before && !waits_.empty() && waits_.top().first <= now_) continue;
                    if (memory_ && !memory_->admits(compute)) continue;
                }
                if (computes_.top().second == compute) computes_.pop();
                run(compute);
            } else if (feed(now_ + 1, 1) || step_reference() || (rule_.fill && fill())) {
                continue;
            } else if (!run_wait()) {
                if (free_.empty()) return false;
                feed(*std::max_element(free_.begin(), free_.end()) + 1, FOREVER);
            }
        }
        return true;
    }

    vector<i64> order;

  private:
    void ready(i64 i) {
        if (t_.kind[i] == COMPUTE) computes_.emplace(rule_.compute[i], i);
        else if (t_.kind[i] == START) starts_[t_.machine[i]].emplace(rule_.collective[i], i);
        else waits_.emplace(lane_end_[t_.start[i]], i);
    }

    i64 next_compute() {
        while (!computes_.empty() && ran_[computes_.top().second]) computes_.pop();
        if (computes_.empty()) return -1;
        i64 best = computes_.top().second;
        if (rule_.strict) {
            while (ran_[sequence_[turn_]]) turn_++;
            if (best != sequence_[turn_]) return -1;
        }
        if (!memory_ || memory_->admits(best)) return best;
        Entry refused[TRIES];
        int count = 0;
        i64 found = -1;
        while (!computes_.empty() && count < TRIES && found < 0) {
            Entry entry = computes_.top();
            computes_.pop();
            refused[count++] = entry;
            if (!ran_[entry.second] && memory_->admits(entry.second)) found = entry.second;
            if (rule_.strict) break;
        }
        for (int k = 0; k < count; k++) computes_.push(refused[k]);
        return found;
    }

    void run(i64 i) {
        order.push_back(i);
        ran_[i] = 1;
        now_ += t_.busy[i];
        progress_ += t_.busy[i];
        if (memory_) memory_->run(i);
        if (t_.kind[i] == START) {
            i64 m = t_.machine[i];
            free_[m] = lane_end_[i] = std::max(free_[m], now_) + t_.lane[i];
        }
        for (i64 e = t_.succ_at[i]; e < t_.succ_at[i + 1]; e++)
            if (!--missing_[t_.succs[e]]) ready(t_.succs[e]);
    }

    bool run_wait() {
        if (waits_.empty()) return false;
        auto [end, i] = waits_.top();
        waits_.pop();
        if (!ran_[i]) {
            now_ = std::max(now_, end);
            run(i);
        }
        return true;
    }

    bool feed(i64 until, i64 work) {
        i64 horizon = progress_ + work;
        bool issued = false;
        for (i64 m = 0; m < t_.machines; m++)
            while (!starts_[m].empty() && (rule_.eager || free_[m] < until)) {
                i64 i = next_start(starts_[m], horizon);
                if (i < 0) break;
                run(i);
                issued = true;
            }
        return issued;
    }

    bool fill() {
        if (waits_.empty()) return false;
        i64 gap = waits_.top().first - now_;
        for (auto &heap : starts_)
            if (!heap.empty() && t_.busy[heap.top().second] <= gap) {
                i64 i = next_start(heap, FOREVER);
                if (i >= 0) {
                    run(i);
                    return true;
                }
            }
        return false;
    }

    i64 next_start(Heap &heap, i64 horizon) {
        Entry refused[TRIES];
        int count = 0;
        i64 found = -1;
        while (!heap.empty() && count < TRIES) {
            Entry entry = heap.top();
            heap.pop();
            i64 i = entry.second;
            if (ran_[i]) continue;
            if ((!rule_.release || rule_.release[i] < horizon) && (!memory_ || memory_->admits(i))) {
                found = i;
                break;
            }
            refused[count++] = entry;
        }
        for (int k = 0; k < count; k++) heap.push(refused[k]);
        return found;
    }

    bool step_reference() {
        if (!memory_) return false;
        i64 i = memory_->upcoming();
        if (!waits_.empty() && (rule_.strict || t_.kind[i] != COMPUTE)) return false;
        run(i);
        return true;
    }

    const Tables &t_;
    const Rule &rule_;
    Continuation *memory_;
    i64 now_ = 0, progress_ = 0;
    size_t turn_ = 0;
    vector<i64> free_, lane_end_, missing_;
    Heap computes_, waits_;
    vector<Heap> starts_;
    vector<i64> sequence_;
    vector<char> ran_;
};

// -- window.improve_window ------------------------------------------------------------------------------------------

struct Value {
    i64 bound, finish;
    bool operator<(const Value &o) const { return bound != o.bound ? bound < o.bound : finish < o.finish; }
};

struct Tail {
    i64 compute = 0;
    vector<i64> machine, wait;

    void extend(const Tables &t, i64 i) {
        i64 after = compute;
        if (t.kind[i] == START) {
            i64 m = t.machine[i];
            machine[m] = std::max(machine[m], wait[i]) + t.lane[i];
            after = std::max(after, machine[m]);
        }
        compute = after + t.busy[i];
        if (t.kind[i] > START) wait[t.start[i]] = std::max(wait[t.start[i]], compute);
    }
};

struct Place {
    i64 now, live;
    const i64 *free, *lane_end;
    i64 tail_compute;
    const i64 *tail_machine, *tail_wait, *unread;
    Value incumbent;
};

struct HashMask {
    size_t operator()(Mask m) const {
        uint64_t x = uint64_t(m) * 0x9E3779B97F4A7C15u ^ (uint64_t(m >> 64) + 0xD1B54A32D192ED03u) * 0xBF58476D1CE4E5B9u;
        return size_t(x ^ x >> 29);
    }
};

constexpr Mask bit(i64 k) { return Mask(1) << k; }

class Search {
  public:
    struct State {
        Mask done;
        i64 now, live, sum_free;
        Value value;
        int32_t parent, task, clocks;  // clocks: where free and ends of the state lie
        int32_t kin;                   // where what is left behind its set of members lies
    };

    i64 expanded = 0;
    bool complete = true;
    vector<i64> answer;
    Value best{0, 0};

    Search(const Tables &t, const i64 *window, i64 length, const Place &place, bool capped, i64 cap, i64 *local)
        : t_(t), window_(window), length_(length), place_(place), capped_(capped), cap_(cap), machines_(t.machines) {
        // ``local``: scratch of the problem's length, -1 everywhere, left as it was.
        for (i64 k = 0; k < length; k++) local[window[k]] = k;
        for (i64 k = 0; k < length; k++) {
            i64 i = window[k];
            Mask need = 0;
            for (i64 e = t.pred_at[i]; e < t.pred_at[i + 1]; e++)
                if (local[t.preds[e]] >= 0) need |= bit(local[t.preds[e]]);
            own_.push_back(need | bit(k));
            if (t.kind[i] > START && !(t.busy[i] + t.alloc[i])) cheap_ |= bit(k);
            slot_.push_back(t.kind[i] == START ? slots_++ : -1);
        }
        for (i64 k = 0; k < length; k++) {
            i64 i = window[k], s = t.kind[i] > START ? t.start[i] : -1;
            wait_slot_.push_back(s >= 0 && local[s] >= 0 ? slot_[local[s]] : -1);
        }
        find_releases(local);
        vector<char> waited(slots_, 0);
        for (i64 k = 0; k < length; k++)
            if (wait_slot_[k] >= 0) waited[wait_slot_[k]] = 1;
        Left first{0, {}};
        first.machine.assign(place.tail_machine, place.tail_machine + machines_);
        for (i64 k = 0; k < length; k++) {
            i64 i = window[k];
            first.busy += t.busy[i];
            if (slot_[k] < 0) continue;
            first.machine[t.machine[i]] += t.lane[i];
            if (place.tail_wait[i] && !waited[slot_[k]]) after_.emplace_back(slot_[k], place.tail_wait[i]);
        }
        left_.push_back(std::move(first));
        for (i64 k = 0; k < length; k++) local[window[k]] = -1;
    }

    // Whether an order better than the incumbent was found; it is in ``answer``.
    bool run(i64 width) {
        const i64 clocks = machines_ + slots_;
        vector<State> level, next;
        clocks_.assign(place_.free, place_.free + machines_);
        clocks_.resize(clocks, 0);
        i64 sum = 0;
        for (i64 m = 0; m < machines_; m++) sum += place_.free[m];
        states_.push_back({0, place_.now, place_.live, sum, {0, 0}, -1, -1, 0, 0});
        vector<int32_t> current{0};
        left_of_.clear();
        left_of_.emplace(Mask(0), 0);
        for (i64 step = 0; step < length_; step++) {
            groups_.clear();
            group_of_.clear();
            for (int32_t s : current) expand(s);
            current.clear();
            for (auto &group : groups_) current.insert(current.end(), group.begin(), group.end());
            if (i64(current.size()) > width) {
                std::stable_sort(current.begin(), current.end(), [this](int32_t a, int32_t b) { return less(a, b); });
                current.resize(width);
                complete = false;
            }
            if (current.empty()) return false;
        }
        int32_t found = current[0];
        for (int32_t s : current)
            if (less(s, found)) found = s;
        best = states_[found].value;
        for (int32_t s = found; states_[s].parent >= 0; s = states_[s].parent) answer.push_back(states_[s].task);
        std::reverse(answer.begin(), answer.end());
        return true;
    }

  private:
    struct Left {
        i64 busy;
        vector<i64> machine;
    };

    bool less(int32_t x, int32_t y) const {
        const State &a = states_[x], &b = states_[y];
        if (a.value < b.value) return true;
        if (b.value < a.value) return false;
        return a.sum_free != b.sum_free ? a.sum_free < b.sum_free : a.live < b.live;
    }

    void find_releases(const i64 *local) {
        releases_.resize(length_);
        vector<i64> seen;
        std::unordered_map<i64, std::pair<Mask, i64>> readers;  // storage -> members that read it, their number
        for (i64 k = 0; k < length_; k++) {
            i64 i = window_[k];
            for (i64 e = t_.eats_at[i]; e < t_.eats_at[i + 1]; e++) {
                auto [at, fresh] = readers.try_emplace(t_.eats[e], Mask(0), 0);
                if (fresh) seen.push_back(t_.eats[e]);
                at->second.first |= bit(k);
                at->second.second++;
            }
        }
        (void)local;
        for (i64 s : seen) {
            auto [mask, count] = readers[s];
            if (count != place_.unread[s]) continue;
            for (i64 k = 0; k < length_; k++)
                if (mask & bit(k)) releases_[k].emplace_back(mask, t_.size[s]);
        }
    }

    i64 end_of(const State &state, i64 k) const {
        return wait_slot_[k] >= 0 ? clocks_[state.clocks + machines_ + wait_slot_[k]]
                                  : place_.lane_end[t_.start[window_[k]]];
    }

    int32_t left_behind(int32_t kin, Mask mask, i64 k) {
        auto [at, fresh] = left_of_.try_emplace(mask, int32_t(left_.size()));
        if (fresh) {
            i64 i = window_[k];
            Left mine = left_[kin];
            mine.busy -= t_.busy[i];
            if (slot_[k] >= 0) mine.machine[t_.machine[i]] -= t_.lane[i];
            left_.push_back(std::move(mine));
        }
        return at->second;
    }

    // Whether no clock of a state is later than those of one whose compute lane is at ``now`` or behind it. What is
    // over by then makes no difference, however long it has been over.
    bool none_later(const i64 *a, const i64 *b, i64 now) const {
        for (i64 c = 0; c < machines_ + slots_; c++)
            if (a[c] > b[c] && a[c] > now) return false;
        return true;
    }

    void expand(int32_t number) {
        Mask missing = ~states_[number].done;
        i64 only = -1;
        ready_.clear();
        for (i64 k = 0; k < length_; k++)
            if ((missing & own_[k]) == bit(k)) ready_.push_back(k);
        if (missing & cheap_)
            for (i64 k : ready_)
                if (cheap_ >> k & 1 && end_of(states_[number], k) <= states_[number].now) {
                    only = k;
                    break;
                }
        if (only >= 0) ready_.assign(1, only);
        for (i64 k : ready_) enter(number, k);
    }

    void enter(int32_t number, i64 k) {
        const State state = states_[number];
        i64 i = window_[k], live = state.live + t_.alloc[i];
        if (capped_ && live > cap_ && t_.alloc[i]) return;
        expanded++;
        const i64 clocks = machines_ + slots_;
        i64 now = state.now + t_.busy[i], sum = state.sum_free;
        mine_.assign(clocks_.begin() + state.clocks, clocks_.begin() + state.clocks + clocks);
        if (slot_[k] >= 0) {
            i64 m = t_.machine[i];
            i64 end = std::max(mine_[m], now) + t_.lane[i];
            sum += end - mine_[m];
            mine_[m] = mine_[machines_ + slot_[k]] = end;
        } else if (t_.kind[i] > START) {
            i64 end = end_of(state, k);
            if (end > state.now) now = end + t_.busy[i];
        }
        Mask mask = state.done | bit(k);
        int32_t kin = left_behind(state.kin, mask, k);
        const Left &left = left_[kin];
        i64 finish = now + left.busy, bound = finish + place_.tail_compute;
        for (i64 m = 0; m < machines_; m++) bound = std::max(bound, mine_[m] + left.machine[m]);
        for (auto [j, rest] : after_) bound = std::max(bound, mine_[machines_ + j] + rest);
        Value value{bound, finish};
        if (!(value < place_.incumbent)) return;
        auto [at, fresh] = group_of_.try_emplace(mask, int32_t(groups_.size()));
        if (fresh) groups_.emplace_back();
        auto &rivals = groups_[at->second];
        for (int32_t r : rivals)
            if (states_[r].now <= now && none_later(&clocks_[states_[r].clocks], mine_.data(), now)) return;
        rivals.erase(std::remove_if(rivals.begin(), rivals.end(),
                                    [&](int32_t r) {
                                        return now <= states_[r].now &&
                                               none_later(mine_.data(), &clocks_[states_[r].clocks], states_[r].now);
                                    }),
                     rivals.end());
        live -= t_.transient[i];
        for (auto &[readers, size] : releases_[k])
            if (!(readers & ~mask)) live -= size;
        int32_t place = int32_t(clocks_.size());
        clocks_.insert(clocks_.end(), mine_.begin(), mine_.end());
        rivals.push_back(int32_t(states_.size()));
        states_.push_back({mask, now, live, sum, value, number, int32_t(i), place, kin});
    }

    const Tables &t_;
    const i64 *window_;
    i64 length_;
    const Place &place_;
    bool capped_;
    i64 cap_, machines_, slots_ = 0;
    Mask cheap_ = 0;
    vector<Mask> own_;
    vector<i64> slot_, wait_slot_;
    vector<vector<std::pair<Mask, i64>>> releases_;
    vector<std::pair<i64, i64>> after_;
    vector<Left> left_;
    std::unordered_map<Mask, int32_t, HashMask> left_of_, group_of_;
    vector<vector<int32_t>> groups_;
    vector<State> states_;
    vector<i64> clocks_, mine_, ready_;
};

// -- local_search ---------------------------------------------------------------------------------------------------

class Local {
  public:
    Local(const Tables &t, bool capped, i64 cap) : t_(t), capped_(capped), cap_(cap), local_(t.n, -1) {}

    // One pass over all windows, last to first; the number of states expanded.
    i64 sweep(i64 *order, i64 length, i64 width, i64 allowance) {
        const i64 n = t_.n;
        OwnedTrace trace(t_);
        replay(t_, order, trace);
        vector<i64> live = profile(t_, order);
        vector<char> loses = loses_time(order, trace);
        vector<i64> free_before(n, 0), free(t_.machines, 0);
        for (i64 k = 0; k < n; k++) {
            i64 i = order[k];
            if (t_.kind[i] != START) continue;
            free_before[i] = free[t_.machine[i]];
            free[t_.machine[i]] = trace.lane_end[i];
        }
        vector<i64> unread(t_.storages, 0);
        Tail tail = at_end();
        i64 used = 0, stop = n, at = n;
        while (stop > 0 && used < allowance) {
            i64 first = std::max<i64>(0, stop - length);
            while (at > first) {
                i64 i = order[--at];
                for (i64 e = t_.eats_at[i]; e < t_.eats_at[i + 1]; e++) unread[t_.eats[e]]++;
                if (t_.kind[i] == START) free[t_.machine[i]] = free_before[i];
            }
            if (std::find(loses.begin() + first, loses.begin() + stop, 1) != loses.begin() + stop) {
                vector<i64> window(order + first, order + stop);
                Place place{trace.begin[window[0]], live[first] - t_.alloc[window[0]], free.data(), trace.lane_end,
                            tail.compute, tail.machine.data(), tail.wait.data(), unread.data(), {0, 0}};
                place.incumbent = evaluate(window, place);
                Search search(t_, window.data(), i64(window.size()), place, capped_, cap_, local_.data());
                bool better = search.run(width);
                used += i64(window.size()) + search.expanded;
                if (better) std::copy(search.answer.begin(), search.answer.end(), order + first);
            }
            i64 step = first ? std::max<i64>(1, (stop - first) / 2) : stop;
            for (i64 k = stop - 1; k > stop - step - 1; k--) tail.extend(t_, order[k]);
            stop -= step;
        }
        return used;
    }

  private:
    Tail at_end() const {
        Tail tail;
        tail.machine.assign(t_.machines, 0);
        tail.wait.assign(t_.n, 0);
        return tail;
    }

    Value evaluate(const vector<i64> &window, const Place &place) {
        i64 now = place.now;
        vector<i64> free(place.free, place.free + t_.machines);
        std::unordered_map<i64, std::pair<i64, bool>> ends;  // start -> end, waited for in the window
        for (i64 i : window) {
            if (t_.kind[i] == COMPUTE) {
                now += t_.busy[i];
            } else if (t_.kind[i] == START) {
                now += t_.busy[i];
                i64 m = t_.machine[i];
                free[m] = std::max(free[m], now) + t_.lane[i];
                ends[i] = {free[m], false};
            } else {
                i64 s = t_.start[i];
                auto at = ends.find(s);
                if (at != ends.end()) at->second.second = true;
                now = std::max(now, at != ends.end() ? at->second.first : place.lane_end[s]) + t_.busy[i];
            }
        }
        i64 value = now + place.tail_compute;
        for (i64 m = 0; m < t_.machines; m++) value = std::max(value, free[m] + place.tail_machine[m]);
        for (auto &[s, end] : ends)
            if (place.tail_wait[s] && !end.second) value = std::max(value, end.first + place.tail_wait[s]);
        return {value, now};
    }

    vector<char> loses_time(const i64 *order, const Trace &trace) {
        vector<char> result(t_.n, 0);
        Tail tail = at_end();
        for (i64 k = t_.n - 1; k >= 0; k--) {
            i64 i = order[k];
            tail.extend(t_, i);
            if (t_.kind[i] == START) {
                i64 begin = trace.lane_begin[i];
                result[k] = begin == trace.end[i] && begin + tail.machine[t_.machine[i]] >= trace.makespan;
            } else if (t_.kind[i] > START) {
                i64 end = trace.lane_end[t_.start[i]];
                result[k] = end > trace.begin[i] && end + tail.compute >= trace.makespan;
            }
        }
        return result;
    }

    const Tables &t_;
    bool capped_;
    i64 cap_;
    vector<i64> local_;
};

}  // namespace

// -- what Python calls: see native.py -------------------------------------------------------------------------------

namespace {

// What Python calls gives these where it cannot give anything else. No exception may leave C++.
constexpr i64 NO_TASK = -1, FAILED = -2;

template <class F>
i64 without_exceptions(F work) {
    try {
        return work();
    } catch (...) {
        return FAILED;
    }
}

}  // namespace

extern "C" {

i64 ip_replay(const Tables *t, const i64 *order, i64 contended, i64 *begin, i64 *end, i64 *lane_begin, i64 *lane_end,
              i64 *exposed, i64 *makespan) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        Trace trace;
        trace.begin = begin, trace.end = end, trace.lane_begin = lane_begin, trace.lane_end = lane_end;
        trace.exposed = exposed;
        i64 wrong = contended ? replay<true>(*t, order, trace) : replay(*t, order, trace);
        *makespan = trace.makespan;
        return wrong;
    });
}

i64 ip_live_bytes(const Tables *t, const i64 *order, i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        live_bytes(*t, order, out);
        return 0;
    });
}

// Makespan and peak, without what happens when.
i64 ip_value(const Tables *t, const i64 *order, i64 contended, i64 *makespan, i64 *peak) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        vector<i64> room(5 * t->n);
        Trace trace;
        trace.begin = room.data(), trace.end = trace.begin + t->n, trace.lane_begin = trace.end + t->n;
        trace.lane_end = trace.lane_begin + t->n, trace.exposed = trace.lane_end + t->n;
        i64 wrong = contended ? replay<true>(*t, order, trace) : replay(*t, order, trace);
        *makespan = trace.makespan;
        vector<i64> live(t->n);
        live_bytes(*t, order, live.data());
        *peak = live.empty() ? t->live0 : *std::max_element(live.begin(), live.end());
        return wrong;
    });
}

i64 ip_latest_issue(const Tables *t, const i64 *order, i64 makespan, i64 *begin, i64 *lane_begin, const i64 *wait_by,
                    i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        Trace trace;
        trace.makespan = makespan, trace.begin = begin, trace.lane_begin = lane_begin;
        latest_issue(*t, order, trace, wait_by, out);
        return 0;
    });
}

i64 ip_as_progress(const Tables *t, const i64 *order, const i64 *begin, const i64 *times, i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        as_progress(*t, order, begin, times, out);
        return 0;
    });
}

i64 ip_lazy(const Tables *t, const i64 *order, i64 hold_waits, i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        lazy(*t, order, hold_waits != 0, out);
        return 0;
    });
}

i64 ip_waits_down(const Tables *t, const i64 *order, i64 limit, i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        waits_down(*t, order, limit, out);
        return 0;
    });
}

i64 ip_starts_up(const Tables *t, const i64 *order, i64 limit, i64 ahead, i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        return starts_up(*t, order, limit, ahead, out);
    });
}

i64 ip_makespans(const Tables *t, const i64 *order, i64 count, const i64 *busy, const i64 *lane, i64 contended,
                 i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        makespans(*t, order, count, busy, lane, contended, out);
        return 0;
    });
}

i64 ip_just_in_time(const Tables *t, const i64 *order, const i64 *early, i64 margin, i64 relief, i64 *position,
                    i64 *latest, i64 *release) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        return just_in_time(*t, order, early, margin, relief != 0, position, latest, release);
    });
}

i64 ip_greedy(const Tables *t, i64 looked_at, i64 *out) {
    return without_exceptions([&]() -> i64 {
        greedy(*t, looked_at, out);
        return 0;
    });
}

i64 ip_on_demand(const Tables *t, const i64 *roots, i64 count, const i64 *need_at, const i64 *needs, i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, roots, count) || !all_tasks(*t, needs, need_at[t->n])) return NO_TASK;
        on_demand(*t, roots, count, need_at, needs, out);
        return 0;
    });
}

// 0 with the added edges and an order, or 1 where no order holds to the cap. Room for 6 edges per task and chain.
i64 ip_implied(const Tables *t, const i64 *producer, const i64 *releasable, i64 chains, i64 cap, i64 *edges, i64 *count,
               i64 *order) {
    return without_exceptions([&]() -> i64 {
        Implied found(*t, producer, releasable, cap);
        if (!found.run(chains)) return 1;
        *count = i64(found.added.size());
        for (i64 k = 0; k < *count; k++) edges[2 * k] = found.added[k].first, edges[2 * k + 1] = found.added[k].second;
        std::copy(found.order.begin(), found.order.end(), order);
        return 0;
    });
}

// 0, or 1 when no machine is there to wait for.
i64 ip_list_schedule(const Tables *t, const i64 *compute, const i64 *collective, const i64 *release, i64 eager,
                     i64 strict, i64 fill, const i64 *reference, i64 cap, const i64 *first, i64 firsts, i64 *out) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, first, firsts) || (reference && !all_tasks(*t, reference, t->n))) return NO_TASK;
        Rule rule{compute, collective, release, eager != 0, strict != 0, fill != 0};
        vector<Continuation> memory;
        if (reference) memory.emplace_back(*t, reference, cap);
        Builder builder(*t, rule, reference ? &memory[0] : nullptr);
        for (i64 k = 0; k < firsts; k++) builder.begin(first[k]);
        if (!builder.build()) return 1;
        std::copy(builder.order.begin(), builder.order.end(), out);
        return 0;
    });
}

// One search of a window; ``facts``: out, value of the answer (2), states expanded, whether it is complete, its length.
i64 ip_improve_window(const Tables *t, const i64 *window, i64 length, i64 now, i64 live, const i64 *free,
                      const i64 *lane_end, i64 tail_compute, const i64 *tail_machine, const i64 *tail_wait,
                      const i64 *unread, i64 incumbent, i64 incumbent_finish, i64 capped, i64 cap, i64 width,
                      i64 *out, i64 *facts) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, window, length)) return NO_TASK;
        Place place{now, live, free, lane_end, tail_compute, tail_machine, tail_wait, unread,
                    {incumbent, incumbent_finish}};
        vector<i64> local(t->n, -1);
        Search search(*t, window, length, place, capped != 0, cap, local.data());
        bool better = search.run(width);
        std::copy(search.answer.begin(), search.answer.end(), out);
        facts[0] = better ? search.best.bound : incumbent;
        facts[1] = better ? search.best.finish : incumbent_finish;
        facts[2] = search.expanded;
        facts[3] = search.complete;
        facts[4] = i64(search.answer.size());
        return 0;
    });
}

// One pass over all windows; ``order`` is changed in place. The number of states expanded.
i64 ip_sweep(const Tables *t, i64 *order, i64 length, i64 width, i64 capped, i64 cap, i64 allowance) {
    return without_exceptions([&]() -> i64 {
        if (!all_tasks(*t, order, t->n)) return NO_TASK;
        return Local(*t, capped != 0, cap).sweep(order, length, width, allowance);
    });
}
}
