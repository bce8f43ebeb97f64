# SPDX-License-Identifier: Apache-2.0
"""The environments `textarena` and `textarena-team`, for games of TextArena.

In `textarena` the policy plays one seat and opponents play the rest. In `textarena-team` the policy plays all seats of
one team, each in a separate conversation. Self-play is not supported: a sample has one reward for all its tokens, but in
self-play one seat's win is another seat's loss.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from relax_core.api import Action, Environment, Observation, Options, Session, Step, Task
from relax_plugin_textarena.opponents import EngineOpponent, Opponent, RandomMoves, Replies

if TYPE_CHECKING:  # importing TextArena takes a second
    from relax_plugin_textarena.match import Match

COLUMN = "textarena"
"""Name of the task file's column with a `TaskGame`, whose fields override the options for this task."""
FORFEIT = -1.0
"""Value of a game that the policy does not finish, on the game's scale from -1 to 1."""
MOVES_OF_OTHERS = 1000
"""Maximum number of opponents' moves between two moves of the policy; no game comes near this number."""
YOUR_TURN = "It is your turn."
"""Observation if the game has no new message, because an observation must not be empty."""


class TextArenaOptions(Options):
    """Options of `textarena`."""

    id: str = "TicTacToe-v0"
    """TextArena's id of the game and its variant."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the game in TextArena, such as `{max_turns = 20}`."""
    seats: int = Field(0, ge=0)
    """Number of players; 0: the minimum that the game allows."""
    seat: int = Field(0, ge=-1)
    """The policy's seat, counted from 0; for a team, the team's first seat. -1: a random seat, drawn from the seed."""
    opponent: Literal["random", "replies", "engine"] = "random"
    """Player of the opponents' seats. `random`: random legal moves. `replies`: the texts in `replies`. `engine`: a pool
    of `[[engines]]`."""
    replies: tuple[str, ...] = ()
    """The opponents' replies, repeated in this order, such as `["[Cooperate]"]`."""
    engine: str = "opponent"
    """For `opponent = "engine"`: name of the pool of `[[engines]]` that plays. Its weights are never updated."""
    engine_prompt: str = "You are playing a game. Answer with your move in the format that the game asks for."
    """System message for the pool's model; empty: no system message."""
    engine_max_new_tokens: PositiveInt = 256
    """Maximum number of tokens in a move of the pool's model."""
    engine_temperature: float = Field(1.0, ge=0.0)
    """Temperature of the pool's model; 0: always the likeliest tokens."""
    after: str = ""
    """Marker such as `</think>`: only the text after the marker's last occurrence is the move, and a turn without the
    marker is an empty move. Empty: the whole text is the move."""
    reward: Literal["unit", "game"] = "unit"
    """Scale of the reward. `unit`: 0 lost, 0.5 drawn, 1 won; games for one player give 0 to 1. `game`: the game's own
    scale from -1 to 1; a sample that a limit cuts off gets 0, and so more than a lost game."""
    max_refused: PositiveInt = 8
    """Number of refused moves in a row after which the policy loses. Most games end earlier, after two."""
    max_turns: int = Field(0, ge=0)
    """Number of turns after which the policy loses; 0: no limit except the game's own."""
    seed_of: Literal["sample", "task"] = "sample"
    """Source of the seed for cards, boards and the opponents' moves. `sample`: each sample has its own seed; `task`: all
    samples of a task, in all epochs, have the same seed."""

    @model_validator(mode="after")
    def _played(self) -> TextArenaOptions:
        if self.opponent == "replies" and not self.replies:
            raise ValueError('opponent = "replies" needs at least one reply: set replies = ["..."]')
        if self.opponent != "replies" and self.replies != type(self).model_fields["replies"].default:
            raise ValueError('replies has no effect without opponent = "replies"; remove it')
        return self


class TextArenaTeamOptions(TextArenaOptions):
    """Options of `textarena-team`: the options of `textarena`, for a game of teams."""

    id: str = "Taboo-v0-animals"
    """TextArena's id of the game and its variant; only Taboo has teams."""
    opponent: Literal["random", "replies", "engine"] = "replies"
    """Player of the opposing team: `replies`, or `engine` for a pool of `[[engines]]`. `random` is refused, because
    Taboo has no templates of moves."""
    replies: tuple[str, ...] = ("...",)
    """The opponents' replies, repeated in this order. The game refuses a clue with a forbidden word, which fails the
    sample."""


class TaskGame(Options):
    """The fields of a task's column `textarena`, which override the options of the same name."""

    id: str = ""
    """TextArena's id of the game. If it is set, the option `kwargs` does not apply."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the game."""
    seed: int = Field(0, ge=0)
    """Seed of all samples of the task, for cards, boards and opponents' moves. Absent: the option `seed_of` decides."""
    seats: int = Field(0, ge=0)
    """Number of players; 0: the minimum that the game allows."""
    seat: int = Field(0, ge=-1)
    """The policy's seat, counted from 0; -1: a random seat, drawn from the seed."""


@dataclass(slots=True)
class Table:
    """A match that has started, its seats, and its opponents."""

    match: Match
    seat: int
    """The policy's seat, or the first seat of its team."""
    own: range
    """All seats of the policy."""
    others: dict[int, Opponent]
    """The opponents by seat."""
    chance: int
    """Seed of the match, its seats and its opponents."""


class TextArena(Environment[TextArenaOptions]):
    """A game of TextArena; the reward is the game's final value for the policy's seat."""

    gives_reward: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("relax_plugin_textarena.match",)
    plays_team: ClassVar[bool] = False

    def __init__(self, options: TextArenaOptions | None = None) -> None:
        super().__init__(options)
        if self.options.opponent == "engine":
            self.needs_engines = (self.options.engine,)

    @classmethod
    async def open(cls, options: TextArenaOptions) -> object:
        """Raise ValueError before the first sample if the game can't be played."""
        new_table(options, None, "", 0, cls.plays_team)
        return None

    async def reset(self, task: Task, seed: int) -> Observation | None:
        await self._start(task, seed)
        return Observation(new_messages(self._table.match, self._table.seat))

    async def step(self, action: Action) -> Step:
        match, seat = self._table.match, self._table.seat
        await self._move(action.text)
        over = self._over()
        return Step(new_messages(match, seat), over, self._worth() if over else None, self._info())

    async def _start(self, task: Task, seed: int) -> None:
        """Start the task's game, and let opponents move until the policy's first turn."""
        table = new_table(self.options, task.metadata.get(COLUMN), task.id, seed, self.plays_team)
        if self.options.opponent == "engine":
            for seat in table.others:
                table.others[seat] = EngineOpponent(
                    self.engines[self.options.engine], self.options.engine_prompt, self.options.engine_max_new_tokens,
                    self.options.engine_temperature, table.chance + seat,
                )  # fmt: skip
        self._table = table
        self._turns = self._refused = self._refused_now = self._refused_of_others = 0
        await self._let_others_play()
        if self._table.match.done:  # without a turn of the policy, the game's value teaches nothing
            raise RuntimeError(f"{self._table.match.variant} ended before the policy's first turn; choose another seat")

    async def _move(self, text: str) -> None:
        """Make the policy's move, and the opponents' moves until the policy's next turn."""
        taken = self._table.match.say(moved(text, self.options.after))
        self._turns += 1
        self._refused += not taken
        self._refused_now = 0 if taken else self._refused_now + 1
        await self._let_others_play()

    def _over(self) -> bool:
        stalled = self._refused_now >= self.options.max_refused
        return self._table.match.done or stalled or 0 < self.options.max_turns <= self._turns

    def _worth(self) -> float:
        match, unit = self._table.match, self.options.reward == "unit"
        worth = match.value(self._table.seat) if match.done else FORFEIT
        if not unit:
            return worth
        return min(1.0, max(0.0, worth if match.seats == 1 else (worth + 1) / 2))

    def _info(self) -> dict[str, Any]:
        match, seat = self._table.match, self._table.seat
        counts = {"seat": seat, "refused": self._refused, "refused_of_others": self._refused_of_others}
        return {**counts, "reason": match.reason(seat)} if match.done else counts

    async def _let_others_play(self) -> None:
        for _ in range(MOVES_OF_OTHERS):
            if self._table.match.done or self._table.match.seat in self._table.own:
                return
            self._refused_of_others += not await play(self._table)
        raise RuntimeError(f"{self._table.match.variant}: the opponents moved {MOVES_OF_OTHERS} times in a row")


class TextArenaTeam(TextArena, Environment[TextArenaTeamOptions]):
    """A game of teams; the reward is the team's value. The policy plays each seat of its team in its own conversation."""

    plays_team: ClassVar[bool] = True

    async def run(self, task: Task, seed: int, session: Session) -> None:
        await self._start(task, seed)
        match, seats = self._table.match, self._table.own
        members = {seat: session if seat == seats[0] else session.restart(task.prompt) for seat in seats}
        member = session
        while not self._over():
            member = members[match.seat]
            member.observe(new_messages(match, match.seat))
            await self._move((await member.generate()).text)
        member.reward(self._worth())


def new_table(options: TextArenaOptions, column: object, name: str, seed: int, team: bool) -> Table:
    """Start the game of a task. Raises ValueError with the task and the fix if the game can't be played."""
    from relax_plugin_textarena.match import Match, game_of

    try:
        row = TaskGame.model_validate({} if column is None else column).model_dump(exclude_unset=True)
        variant = row.get("id", options.id)
        game = game_of(variant)
        if team != game.team:
            raise ValueError(
                f"{variant} is {'not ' * team}a game of teams; its environment is textarena{'-team' * (not team)}"
            )
        chance = row.get("seed", zlib.crc32(name.encode()) if options.seed_of == "task" else seed)
        settings = row.get("kwargs", {} if "id" in row else options.kwargs)
        match = Match(variant, settings, row.get("seats", options.seats), chance)
        seat = row.get("seat", options.seat)
        size = match.seats // 2 if team else 1
        if seat < 0:
            seat = Random(f"seat {chance}").randrange(match.seats // size) * size
        if seat >= match.seats or seat % size:
            raise ValueError(
                f"{variant} has the seats 0 to {match.seats - 1}; {seat} is not a seat{' that begins a team' * team}"
            )
        if options.opponent == "random" and match.seats > size and not game.moves:
            raise ValueError(f'{variant} has no random opponent: set opponent to "replies" or "engine"')
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(
            f"task {name}: column {COLUMN} is {column!r}, which does not describe a game: {wrong}"
        ) from error
    except ValueError as error:
        raise ValueError(f"task {name}: {error}" if column is not None else str(error)) from error
    own = range(seat, seat + size)
    others: dict[int, Opponent] = {}
    for other in (other for other in range(match.seats) if other not in own):
        scripted = options.opponent == "replies"
        others[other] = Replies(options.replies) if scripted else RandomMoves(game, chance + 1 + other)
    return Table(match, seat, own, others, chance)


async def play(table: Table) -> bool:
    """Let the opponent whose turn it is make a move; return False if the game refused the move."""
    match, seat = table.match, table.match.seat
    heard = match.heard(seat)
    text = await table.others[seat].move(match, joined(heard), heard)
    taken = match.say(text)
    if not taken and table.others[seat].scripted:
        raise ValueError(f"{match.variant} refuses the move {text[:100]!r} of the scripted opponent; correct replies")
    return taken


def new_messages(match: Match, seat: int) -> str:
    return joined(match.heard(seat))


def joined(heard: list[tuple[str, str]]) -> str:
    """Join messages into one text; messages of players begin with the player's name."""
    return "\n".join(f"[{who}] {text}" if who else text for who, text in heard).strip("\n") or YOUR_TURN


def moved(text: str, after: str) -> str:
    """Return the move in a response: the text after the last marker `after`, or empty if the marker is missing."""
    if not after:
        return text
    _, mark, move = text.rpartition(after)
    return move if mark else ""
