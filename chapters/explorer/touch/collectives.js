// Collectives in frames, recorded from four ranks (collective_frames.cpp). Piece p
// of rank r is the number 2^(4 p + r).

THINGS.collectives = (parts) => {
  const letters = (first, count) => "abcd".slice(first, first + count);

  function show({ frames }, step) {
    const { ranks, messages } = frames[step];
    const left = 50, place = Math.min(110, (parts.picture.clientWidth - left) / 4);
    const wide = place - 14, row = 56, tall = 24;
    const sent = ranks.map((_, rank) => frames.slice(0, step).flatMap(
        (frame) => frame.messages).filter(([from]) => from === rank)
        .reduce((sum, [, , , count]) => sum + count, 0));
    const values = {
      now: listed(messages.map(([from, to, first, count]) => filled("message", {
        from, to, pieces: letters(first, count) })), "semicolon") || filled("nothing"),
      sent: listed(sent.map((count, rank) => filled("rank", { rank }) + " " +
          filled(count < 2 ? `sent_${count}` : "sent", { sent: count }))) };
    const svg = picture(left + 4 * place, 4 * row, filled("collectives_now", values));
    ranks.forEach((pieces, rank) => {
      const y = row * rank + 16;
      draw(svg, "text", { x: 0, y: y + 16 }, filled("rank", { rank }));
      pieces.forEach((bits, at) => {
        const x = left + place * at;
        box(svg, "empty", x, y, wide, tall);
        if (!bits) return;
        const piece = [0, 1, 2, 3].find((p) => bits >> 4 * p & 15);
        for (let r = 0; r < 4; ++r) {
          if (bits >> 4 * piece + r & 1) {
            box(svg, rankKind(r), x + wide / 4 * r, y, wide / 4 - 1, tall);
          }
        }
        draw(svg, "text", { x, y: y - 3 }, "abcd"[piece]);
      });
    });
    for (const [from, to, first, count] of messages) {
      const x = left + place * first, y = row * from + 16;
      const middle = x + place * count / 2 - 7 + 3 * (to - from);
      draw(svg, "rect", { class: "line", x: x - 2, y: y - 2,
                          width: place * count - 10, height: tall + 4 });
      const isDown = to > from, begin = y + (isDown ? tall + 2 : -2);
      const end = row * to + 16 + (isDown ? -2 : tall + 2), head = isDown ? -6 : 6;
      draw(svg, "path", { class: "line", d: `M${middle} ${begin}L${middle} ${end}` +
          `m-4 ${head}l4 ${-head}l4 ${head}` });
    }
    parts.picture.replaceChildren(svg);
    parts.now.textContent = filled("collectives_now", values);
  }

  parts.about.textContent = filled("collectives_about");
  return stepped(parts, "collectives_label", {
    collective: { values: Object.keys(DATA.frames) },
  }, ({ collective }) => {
    const frames = DATA.frames[collective];
    return { frames, count: frames.length };
  }, show);
};
