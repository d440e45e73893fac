"""The pictures that the notebooks store, and what nbconvert makes of them."""

import base64
import json
import pathlib
import re
import unittest
import xml.etree.ElementTree as xml

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
PAGE = 860  # pixels, on which texts have at least 12

# Attributes alone, and none that refers to another element: viewers drop
# styles, and all pictures of a page share its ids.
ALLOWED = {
    "svg": "viewBox width height font-family font-size fill role aria-label",
    "title": "",
    "rect": "x y width height fill stroke",
    "path": "d fill stroke stroke-width stroke-dasharray",
    "circle": "cx cy r fill",
    "text": "x y fill text-anchor font-size font-weight",
}


def pictures():
    """(notebook and cell, SVG, HTML) of each stored picture."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        for index, cell in enumerate(cells):
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if "image/svg+xml" in data:
                    yield (f"{path.stem}, cell {index + 1}",
                           "".join(data["image/svg+xml"]),
                           "".join(data.get("text/html", "")))


class PicturesTest(unittest.TestCase):
    def test_pictures_have_attributes_alone(self):
        for where, svg, _ in pictures():
            with self.subTest(where):
                for element in xml.fromstring(svg).iter():
                    name = element.tag.removeprefix(
                        "{http://www.w3.org/2000/svg}")
                    self.assertIn(name, ALLOWED)
                    self.assertLessEqual(set(element.attrib),
                                         set(ALLOWED[name].split()), name)

    def test_pictures_have_sizes_and_texts(self):
        count = 0
        for where, svg, _ in pictures():
            with self.subTest(where):
                root = xml.fromstring(svg)
                _, _, width, height = map(float, root.get("viewBox").split())
                self.assertEqual(float(root.get("width")), width)
                self.assertEqual(float(root.get("height")), height)
                title = root[0].text
                self.assertTrue(root[0].tag.endswith("title"))
                self.assertGreater(len(title.split()), 3, "says nothing")
                self.assertEqual(root.get("role"), "img")
                label = root.get("aria-label")
                self.assertTrue(label.startswith(title + ". "))
                self.assertGreater(len(label), len(title) + 10)
                for text in root.iter("{http://www.w3.org/2000/svg}text"):
                    size = float(text.get("font-size", root.get("font-size")))
                    self.assertGreaterEqual(size * min(PAGE / width, 1), 12)
                count += 1
        self.assertGreater(count, 50)

    def test_texts_stay_inside_and_do_not_overlap(self):
        """By a width that the letters of common fonts have at least."""
        for where, svg, _ in pictures():
            with self.subTest(where):
                root = xml.fromstring(svg)
                left, _, width, _ = map(float, root.get("viewBox").split())
                lines = {}
                for text in root.iter("{http://www.w3.org/2000/svg}text"):
                    length = 5.5 * len(text.text)
                    begin = float(text.get("x")) - length * {
                        None: 0, "middle": 0.5, "end": 1}[
                            text.get("text-anchor")]
                    self.assertGreaterEqual(begin, left, text.text)
                    self.assertLessEqual(begin + length, left + width,
                                         text.text)
                    lines.setdefault(text.get("y"), []).append(
                        (begin, begin + length, text.text))
                for line in lines.values():
                    line.sort()
                    for one, next_one in zip(line, line[1:]):
                        self.assertLessEqual(one[1], next_one[0],
                                             (one, next_one))

    def test_images_are_the_pictures(self):
        for where, svg, html in pictures():
            with self.subTest(where):
                image = re.fullmatch(
                    r'<img alt="([^"]+)" width="(\d+)" '
                    r'src="data:image/svg\+xml;base64,([^"]+)"/>\n', html)
                self.assertTrue(image)
                self.assertEqual(base64.b64decode(image[3]).decode(), svg)
                self.assertIn(f'aria-label="{image[1]}"', svg)
                self.assertIn(f' width="{image[2]}"', svg)

    def test_nbconvert_keeps_every_picture(self):
        try:
            import nbconvert
        except ImportError:
            self.skipTest("there is no nbconvert")
        wanted = [(where, html) for where, _, html in pictures()
                  if where.startswith("05_gpipe")]
        page, _ = nbconvert.HTMLExporter().from_filename(
            str(FOLDER / "05_gpipe.ipynb"))
        images = re.findall(r"<img [^>]*data:image/svg[^>]*>", page)
        self.assertEqual(len(images), len(wanted))
        for image, (where, html) in zip(images, wanted):
            with self.subTest(where):
                for name in ("alt", "src"):
                    value = f'{name}="[^"]+"'
                    self.assertEqual(re.search(value, image)[0],
                                     re.search(value, html)[0])


if __name__ == "__main__":
    unittest.main(verbosity=2)
